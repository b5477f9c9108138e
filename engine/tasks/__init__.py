"""Tasks other than text generation: embeddings, handlers and transformers pipelines.

Imports `engine.loading` and `engine.vision`.
"""
