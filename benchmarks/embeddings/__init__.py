"""Embeddings on a CPU, beside other systems."""
