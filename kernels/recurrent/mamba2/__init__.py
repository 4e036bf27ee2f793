"""Mamba2: decode, chunks of a prompt, and their reference."""
