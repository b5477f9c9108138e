"""Clients: transports move bytes, schemas encode requests and decode responses."""
