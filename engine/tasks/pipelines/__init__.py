"""Tasks of transformers' pipelines: inputs, models and answers."""
