"""Layers that recur: what sums up the tokens before is a state, not a cache."""
