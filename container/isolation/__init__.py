"""Helper processes of each worker, for work that a hostile request could make crash or never end.

`helper` sends them jobs, and `child` starts a process when it is needed. One process, for grammars
and long conversations, runs `process`; `jobs` defines its messages. The other, for images, runs
`engine.vision.reader`: reading images needs transformers, which this package does not import.
"""
