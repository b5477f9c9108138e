"""Encoders: models that read whole texts at once, such as BERT.

Imports `engine.loading`, `engine.model` and `engine.step`.
"""
