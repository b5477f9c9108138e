"""The decoder: its layers, the table of families, linear layers with their weight formats, and the
loading of weight files.

Imports `engine.attention` and `engine.group`.
"""
