"""LMI's text schema: `inputs` and `parameters`."""
