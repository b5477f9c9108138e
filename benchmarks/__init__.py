"""Measures the kernels and the engine on a GPU; docs/benchmarks.md says what and how."""
