"""Training of the demo model, and of its drafters."""
