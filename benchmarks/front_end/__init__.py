"""Measures the front end alone: its CPU time for each token and request, before a fake engine."""
