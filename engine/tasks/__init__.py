"""Tasks other than text generation; each performer is a room.

Imports `engine.loading`; `build` also imports `engine.build`.
"""
