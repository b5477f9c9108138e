"""Starts, monitors and stops the processes.

Imports `configuration`, `models`, `security` and `tracing`.
"""
