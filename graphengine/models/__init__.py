"""Model families, and what the engine knows of them.

    contract   what a model tells the engine: linears, states of layers, weights, two programs
    families   the table of architectures: a new family is a file and a line there
    blocks/    parts of layers, of which families are composed
    decoder    the composition that Llama, Qwen2 and Qwen3 share: attention, then SwiGLU or experts
    stored     a checkpoint's config and tensors, checked together
    mtp        draft modules that a checkpoint carries beside its model
    chains     a model's linears in a row, for `graphengine tune`
    routing    who is told which experts a decode step takes

Nothing outside of this folder names a family; a test holds that.
"""
