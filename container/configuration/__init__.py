"""Options: read from serving.properties and the environment, resolved and reported."""
