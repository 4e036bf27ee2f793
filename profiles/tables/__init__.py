"""Figures as text and as pages: percentiles, tables, docs/numbers.md."""
