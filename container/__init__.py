"""The server around the engine: HTTP, processes and files. It starts the engine as a process."""
