"""Heads that draft from the hidden states of the model that they belong to."""
