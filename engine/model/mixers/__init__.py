"""Parts that take the place of attention, in layers that keep a state of each sequence."""
