"""Gated delta rule: decode, chunks of a prompt, and their reference."""
