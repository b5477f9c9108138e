"""Encoders: models that read whole texts at once, such as BERT."""
