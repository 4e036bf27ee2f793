"""Recurrent layers: a state, not a cache, sums up the tokens before."""
