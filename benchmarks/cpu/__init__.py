"""Compares our server on a CPU with other systems, on the same model and requests."""
