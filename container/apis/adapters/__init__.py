"""LoRA adapters: load, unload, list."""
