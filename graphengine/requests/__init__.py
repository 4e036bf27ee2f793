"""Requests: the handle, the options that it asks for, and the results."""
