"""The floor of a decode step: the bytes that it must read, and how fast the device reads them."""
