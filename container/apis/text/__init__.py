"""LMI's text API: `inputs` and `parameters`."""
