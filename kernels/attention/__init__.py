"""Paged attention: the kernels for decodes and prefills, and their work lists."""
