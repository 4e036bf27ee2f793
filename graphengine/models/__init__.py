"""Model families, and what the engine knows about them.

    contract   what a model tells the engine: linears, states of layers, weights, two programs
    families   the table of architectures: a new family is a file and a line there
    blocks/    the parts that families compose their layers from
    decoder    the composition that Llama, Qwen2 and Qwen3 share: attention, then SwiGLU or experts
    stored     a checkpoint's config and tensors, checked together
    mtp        draft modules that a checkpoint carries with its model
    chains     a model's linears in a row, for `graphengine tune`
    routing    observes, records and overrides which experts a step's lanes take

Nothing outside this folder names a family; a test checks that.
"""
