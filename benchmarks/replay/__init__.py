"""Runs the traffic of a recording through the strategies again; see __main__."""
