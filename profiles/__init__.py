"""Benchmarks and latency reports."""
