"""Batching strategies: which tokens of which sequences run next, in which KV blocks.

Plain Python: no device, no I/O, and the time is an argument. `make_strategy` is the way in.
"""
