"""Everything that touches HTTP, processes and files; the engine is a process it starts."""
