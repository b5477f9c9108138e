"""Answers all requests of a file in OpenAI's batch format, with a container of its own."""
