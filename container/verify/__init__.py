"""Computes logged answers again, and compares them (docs/same-bits.md)."""
