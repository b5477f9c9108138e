"""Loads a model: our own decoder, transformers' code, and the gate that compares the two.

Imports `engine.model`, `engine.lora` and `engine.attention`.
"""
