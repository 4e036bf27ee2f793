"""What ranks do together."""
