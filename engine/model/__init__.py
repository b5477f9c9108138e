"""The decoder: layers, families, linear layers and their weight formats, and the weights' files.

Imports `engine.attention`.
"""
