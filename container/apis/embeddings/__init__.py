"""OpenAI's embeddings, and text-embeddings-inference's `inputs`."""
