"""The engine as a process: message loop, socket, statistics, grammar compilation and adapters.

Imports `engine.engine`, `engine.lora`, `engine.sampling` and `engine.tasks`.
"""
