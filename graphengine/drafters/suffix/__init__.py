"""Drafts of the longest match of the last tokens, in a request's text or a corpus."""
