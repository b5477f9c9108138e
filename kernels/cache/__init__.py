"""Kernels that write, copy and move the blocks of the KV cache."""
