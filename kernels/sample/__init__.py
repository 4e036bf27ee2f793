"""The sampler: filters, noise, and the token."""
