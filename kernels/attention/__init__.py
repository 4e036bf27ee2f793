"""Attention over the paged KV cache, for decode and prefill."""
