"""The simulator beside measurements: fitted step times, and runs that are replayed."""
