"""Tasks other than text generation: embeddings, handlers and transformers pipelines.

Imports `engine.encoder`, `engine.loading`, `engine.lora` and `engine.vision`.
"""
