"""`LLM`: the engine without a server, with vLLM's offline interface.

Imports `engine.build`, `engine.engine`, `engine.lora` and `engine.tasks`.
"""
