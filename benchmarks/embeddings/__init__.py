"""Embeddings on a CPU, beside sentence-transformers."""
