"""Changes to logits that requests ask for, and log-probabilities."""
