"""Helper processes of each worker, for work in which a hostile request may crash or never end.

`helper` sends them jobs, and `child` starts each one when it is needed. `process` runs in the one
for grammars and long conversations; `jobs` defines its messages. The one for images runs the
engine's `engine.vision.reader`, since it needs transformers.
"""
