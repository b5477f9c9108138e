"""The data types shared by all packages: options, sampling parameters, sequences, plans, messages.

core imports no other package of this repository, no torch and no sockets.
"""
