"""Sections of `make gpu` that time whole engines."""
