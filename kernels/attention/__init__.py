"""Attention over the paged KV cache, of decode steps and of prefill."""
