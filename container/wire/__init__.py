"""The client of the engine, and the replies that arrive from it. Imports no other room."""
