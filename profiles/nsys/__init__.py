"""Traces of Nsight Systems and torch's profiler as runs."""
