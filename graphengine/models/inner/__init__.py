"""Codes of frames, and the parts of a model that draw them within one step.

A speech model's step emits a frame of codes. The model's own head gives the first. The others come
from an inner decoder, a small decoder that runs several times within the step and reads the model's
output and then each code; or from parallel heads, which all read the model's output.

    drawn.py           the two, as the rest of the engine sees them
    inner_decoder.py   sizes and names of an inner decoder, as a family reads them from a config
    weights.py         its weights
    stacked_layers.py  layers whose weights differ from run to run
    steps.py           its runs in a captured step
    parallel_heads.py  sizes, names and weights of parallel heads, and the delays of their codes
    late_codes.py      codes that come with the next frame
    given_frames.py    frames as callers give them
"""
