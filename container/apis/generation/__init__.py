"""What every API of text generation shares."""
