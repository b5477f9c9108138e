"""Pipelines and the user's handlers: the body goes to the engine whole."""
