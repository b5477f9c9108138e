"""`LLM`: the engine without a server, with the interface of vLLM's `LLM`.

Imports `engine.build`, `engine.engine`, `engine.lora` and `engine.tasks`.
"""
