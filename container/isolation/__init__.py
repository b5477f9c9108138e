"""Helper processes of each worker, for work in which a hostile request may crash or never end.

`helper` sends them jobs, and `child` starts a process when it is needed. One process, for grammars
and long conversations, runs `process`; `jobs` defines its messages. The other, for images, runs the
engine's `engine.vision.reader`, because that needs transformers.
"""
