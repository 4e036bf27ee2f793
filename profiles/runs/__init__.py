"""Recorded runs: files, percentiles, findings, reports."""
