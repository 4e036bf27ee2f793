"""`graphengine bench` of a robot's policy: a chunk of actions, and its denoising steps.

asked.py   the options
floor.py   the bytes that a chunk must read
chunks.py  the measurements
"""
