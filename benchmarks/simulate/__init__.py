"""Simulates the real strategies and memory managers on a simulated clock; see __main__."""
