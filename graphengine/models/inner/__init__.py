"""Inner decoders: a small decoder that runs several times within one step of a model.

A speech model's step emits a frame of codes. The model's own head gives the first; the inner
decoder, which reads the model's output and then each code, gives the others.

    inner_decoder.py  sizes and names, as a family reads them from a config
    weights.py        its weights
    steps.py          its runs in a captured step
"""
