"""Several products of a decode step in one persistent launch."""
