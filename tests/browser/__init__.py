"""The live page in a real browser: its tests, and the pictures of README and docs.

Like `conformance`, it has an environment of its own (`.browser`); the server runs in ours.
"""
