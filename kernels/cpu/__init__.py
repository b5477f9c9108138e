"""The kernels of CPUs, in C++: same names, signatures and meaning as torch_cache.py,
torch_elementwise.py and sdpa.py, which compute what these do not and where no compiler is.
"""
