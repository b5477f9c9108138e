"""Writes models as GGUF files, and compares our answers with those of llama.cpp's own server."""
