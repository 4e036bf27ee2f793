"""Frames of codes: the kernels, other than products, of steps that emit several codes.

embed.py      the embedding of a whole frame, which begins a step
codes.py      each code on its way to the next position of an inner decoder, and the frame's end
delays.py     all codes of a frame at once, each delayed by one step more than the code before it
given.py      codes that requests give
logprobs.py   log-probabilities of codes, and their mailbox
"""
