"""Requests that one call in the engine answers: pipelines and the user's own handler."""
