"""Everything that is not text generation: pipelines, embeddings, the user's own code."""
