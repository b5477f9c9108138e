"""Tensor parallelism: the processes that share one copy of a model, and what each one holds.

Imports `engine.group`, `engine.step` and the layers below them.
"""
