"""Quantized checkpoints, quantization at load, and the formats that multiply by such weights."""
