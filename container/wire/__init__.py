"""The engine's client and its replies. Imports no other folder of `container`."""
