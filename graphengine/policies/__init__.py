"""Robot policies that denoise a chunk of actions: one replay from a prefix to the actions."""
