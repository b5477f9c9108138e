"""Benchmarks of the kernels and the engine; see docs/benchmarks.md."""
