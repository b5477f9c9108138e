"""Sections of `make gpu` that check and time kernels."""
