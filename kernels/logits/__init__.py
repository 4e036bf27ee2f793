"""What requests ask of their logits, and log-probabilities."""
