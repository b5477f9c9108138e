"""KV cache use, sharing and savings of the real strategies; see __main__."""
