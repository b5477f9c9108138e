"""LoRA adapters: low-rank additions to linear layers, several of them in one batch.

Imports `engine.model`.
"""
