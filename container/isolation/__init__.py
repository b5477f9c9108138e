"""A process beside each worker, for the work that a hostile request can make crash or run on.

`helper` starts the process and sends it jobs, `process` is what it runs, and `jobs` defines the
messages between the two.
"""
