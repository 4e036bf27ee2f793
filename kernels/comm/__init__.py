"""Kernels that exchange data between ranks."""
