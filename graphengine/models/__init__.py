"""Model families, and their interface to the engine.

    contract      the interface of a model: linears, states of layers, weights, two programs
    composition   the config of every model: its layers, and the linears, states and sizes of these
    sublayers     a block with the norms around it, of which layers are made
    decoder       the weights of such a model, and its two programs: decode and prefill
    decoder_layer a layer's weights and programs
    vocabulary    this rank's rows of lm_head
    routing       observes, records and overrides which experts a step's lanes take
    blocks/       attention, recurrent blocks and feed-forwards
    families/     a file for each family; `registry` is the table of architectures
    hf/           reads and checks `config.json`
    checkpoints/  files, names and tensors, and a checkpoint checked as a whole (`stored`)
    quantised/    weights in 8 and 4 bits as checkpoints have them
    splitting/    a rank's part of a model
    plans/        plans of linears, tables of them, and chains to measure them with

Nothing outside this folder names a family; a test checks that. `graphengine.drafters` builds its
layers from the same blocks.
"""
