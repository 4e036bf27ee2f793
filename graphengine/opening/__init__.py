"""From a checkpoint to a running engine: what it will hold, and how that is allocated."""
