"""Loads models: our own decoder or transformers' code, and the gate that compares the two.

Imports `engine.model`, `engine.attention` and `engine.vision`.
"""
