"""Simulates what fleets of many machines serve, and what that costs; see __main__."""
