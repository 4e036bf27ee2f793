"""Checkpoints that tests write: cut down, random, or made for one purpose."""
