"""Files of models: a cache of directories, and GGUF files."""
