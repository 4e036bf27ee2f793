"""Clocks under the control of tests, simulated runs, and files as profilers write them."""
