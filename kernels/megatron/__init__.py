"""The public row kernels that are compatible with Megatron's; the engine calls none of them."""
