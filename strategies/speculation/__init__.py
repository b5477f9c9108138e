"""Speculation: a step also computes proposed tokens, and keeps those that it would have sampled.

Nothing outside this folder and `engine.speculation` knows it. A strategy has it as its extension.
"""
