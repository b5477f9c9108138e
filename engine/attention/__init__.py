"""Paged attention: one layer's call, the backends that compute it, and the KV cache they share.

Imports `kernels` and `core`.
"""
