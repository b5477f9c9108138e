"""How much of the KV memory is used, shared and saved, from the real strategies; see __main__."""
