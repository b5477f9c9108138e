"""Starts, watches and stops the processes. Imports `container.configuration` and `models`."""
