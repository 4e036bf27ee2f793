"""LoRA adapters: folders that peft has saved, static slots for them, and merging one."""
