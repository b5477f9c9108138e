"""Norms, gated activations and rotary embeddings."""
