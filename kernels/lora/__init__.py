"""Low-rank adapters (LoRA) of linears: static slots, and what each lane adds to its products."""
