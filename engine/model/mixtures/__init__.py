"""Mixtures of experts: a router picks the experts of each token."""
