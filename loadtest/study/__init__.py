"""Runs: compared in rounds, swept over rates, summarized and stored."""
