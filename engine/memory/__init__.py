"""Device memory: measures the largest step and sizes the KV cache to the rest.

Imports `engine.resolve`, `engine.step` and the layers below it.
"""
