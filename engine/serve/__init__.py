"""The engine as a process: the message loop, its socket, metrics, grammars and adapters.

Imports `engine.engine`, `engine.lora`, `engine.sampling` and `engine.tasks`.
"""
