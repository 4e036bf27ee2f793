"""The demo checkpoint and the script that trained it."""
