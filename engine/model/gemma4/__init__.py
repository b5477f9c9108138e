"""Gemma 4's layers: K and V of several sizes or of another layer, and inputs of their own."""
