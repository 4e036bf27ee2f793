"""Per-layer embeddings: inputs of each layer that depend only on the token."""
