"""Inputs that tokens bring to each layer by themselves."""
