"""From a checkpoint to a running engine: memory planning, allocation and loading."""
