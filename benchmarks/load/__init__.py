"""The load of the serving benchmarks, and what its clients see."""
