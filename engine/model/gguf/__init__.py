"""GGUF files: their metadata as config.json and tokenizer, and their tensors by our names."""
