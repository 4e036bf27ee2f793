"""Faults that tests plant, to see that they are found."""
