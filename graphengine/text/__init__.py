"""Text: tokens to text and back, chat templates, stop strings."""
