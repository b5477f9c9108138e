"""Device memory: measures the largest step and sizes the KV cache to what is left.

Imports `engine.step` and the rooms below it.
"""
