"""Tasks other than text generation: embeddings, handlers and transformers pipelines.

Imports `engine.loading`; `build` also imports `engine.parts`.
"""
