"""Executors, which run a step on the device: the packed one with its parts, and the library one.

Imports `engine.loading`, `engine.sampling`, `engine.lora`, `engine.attention` and `engine.ranks`.
"""
