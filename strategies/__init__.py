"""Batching strategies: decide which tokens of which sequences run next, in which KV blocks.

Plain Python: no device, no I/O, and time is an argument. Create one with
`strategies.factory.make_strategy`.
"""
