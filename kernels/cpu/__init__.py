"""C++ kernels for CPUs.

The functions of the same names in torch_cache.py, sdpa.py, torch_elementwise.py and torch_logits.py
are the fallback for unsupported inputs and for machines without a compiler.
"""
