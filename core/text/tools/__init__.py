"""Calls of functions in what a model says: one file for each way that models write them."""
