"""Bookkeeping of KV blocks in plain Python. The tensors are in engine/."""
