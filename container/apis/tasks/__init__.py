"""The APIs of pipelines and of the user's own handler: one call in the engine answers a request."""
