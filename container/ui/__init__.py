"""The live page at `/`: static files and a stream of events (docs/operate.md)."""
