"""Flow matching: the noise that a chunk of actions begins as, and a step towards the actions."""
