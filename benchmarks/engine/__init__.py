"""What one engine does: its host time, start, accuracy and ranks, mostly without a GPU."""
