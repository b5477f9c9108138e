"""Bookkeeping of KV memory in plain Python; the tensors are in engine/."""
