"""Processes beside each worker, for the work that a hostile request can make crash or run on.

`helper` sends them jobs, and `child` starts each one when it is needed. `process` is what the one
for grammars and long conversations runs, and `jobs` defines its messages. The other one, for
images, is the engine's `engine.vision.reader`, since it needs transformers.
"""
