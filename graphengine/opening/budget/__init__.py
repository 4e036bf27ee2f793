"""The memory that an engine will take, before it takes any: weights, KV, states, graphs."""
