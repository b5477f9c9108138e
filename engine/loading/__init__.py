"""Loads models: our own decoder or transformers' code, and the gate that compares the two.

Imports `engine.model`, `engine.lora`, `engine.attention`, `engine.ranks` and `engine.vision`.
"""
