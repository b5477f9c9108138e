"""The model: its layers, its weights and how they are loaded and checked.

May import what a step is made of (`engine.attention`, `engine.inputs`, `engine.kv_cache`,
`engine.paged_step`), `engine.lora`, kernels and core; nothing of the loop or the server.
"""
