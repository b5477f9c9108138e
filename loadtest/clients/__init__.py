"""Ways to ask: how bytes travel (transports), and what they say (schemas)."""
