"""Finds the options under which recorded requests fare best; see __main__."""
