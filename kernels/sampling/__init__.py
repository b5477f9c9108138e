"""Kernels that draw tokens from logits without sorting them."""
