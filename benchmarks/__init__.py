"""Measures the kernels on a GPU; docs/benchmarks.md says what and how."""
