"""`make gpu`: checks and times the kernels and the engine on a GPU."""
