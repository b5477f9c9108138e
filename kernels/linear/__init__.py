"""Linear layers with quantized weights, for one expert or many."""
