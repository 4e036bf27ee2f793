"""Products of experts with the tokens of a prompt, on Hopper."""
