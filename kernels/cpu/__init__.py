"""The kernels of CPUs, in C++: same names, signatures and meaning as torch_cache.py, sdpa.py,
torch_elementwise.py and torch_logits.py, which compute what these do not and where no compiler is.
"""
