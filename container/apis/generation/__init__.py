"""The code that all text generation APIs share."""
