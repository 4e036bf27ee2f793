"""Low-rank adapters (LoRA) of linears: static slots, and each lane's addition to products."""
