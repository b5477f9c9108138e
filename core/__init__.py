"""The nouns that all packages share: requests, sequences, plans of a step, sampling parameters.

core imports no other package of this repository, no torch and no sockets.
"""
