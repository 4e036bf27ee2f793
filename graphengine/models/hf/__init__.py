"""What is read of Hugging Face's `config.json`, and what of it is refused."""
