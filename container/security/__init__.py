"""Who may use the server: API keys with limits, and HTTPS. Imports `container.http` only."""
