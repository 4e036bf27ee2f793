"""Ranks with requests of their own, which share a model's experts."""
