"""Tensor parallelism: the processes that share one copy of a model, and what each one holds.

Imports nothing else of the engine.
"""
