"""Paged attention: one layer's call, the backends that compute it, and the KV cache.

Imports `kernels` and `core`.
"""
