"""Reasoning in answers: one parser for each format in which models write it."""
