"""Starts, monitors and stops the processes. Imports `configuration` and `models`."""
