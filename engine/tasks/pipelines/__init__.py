"""transformers' pipelines: their inputs, models and answers."""
