"""Options: reading them from serving.properties and the environment, and reporting them."""
