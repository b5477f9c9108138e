"""C++ kernels for CPUs, with the names and signatures of torch_cache.py, sdpa.py,
torch_elementwise.py and torch_logits.py, which are the fallback for unsupported inputs and for
machines without a compiler.
"""
