"""Text embeddings from transformers or sentence-transformers checkpoints."""
