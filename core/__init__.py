"""The nouns of the system: options, sampling parameters, sequences, plans, messages, text.

Imported by every other package and importing none of them; no torch, no sockets.
"""
