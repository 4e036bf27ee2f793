"""Reads and checks Hugging Face's `config.json`: which keys are read, and which are refused."""
