"""One step on the device: the packed executor and what it needs, and the library executor.

Imports `engine.loading`, `engine.sampling` and `engine.attention`.
"""
