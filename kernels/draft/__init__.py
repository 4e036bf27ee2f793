"""Drafts: the modules around a draft layer, n-grams, draft models, relaxed acceptance."""
