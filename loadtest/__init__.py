"""Measures serving containers over HTTP, ours and others; imports nothing of the server."""
