"""Weights of 8 and 4 bits: their configs in checkpoints, and how they are read and made.

schemes, config, *_config  read a config's scheme for each linear
stored_tensors, readers    a checkpoint's tensors as one kind of weight
concatenate                several linears as one
forms, filling, cutting    how a weight is held, filled, and cut for ranks
rounding, writer           making them from 16 bits, and writing checkpoints
"""
