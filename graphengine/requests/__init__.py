"""Requests: the handle, the options that it asks for, grammars, and the results."""
