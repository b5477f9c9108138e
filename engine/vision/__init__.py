"""Images in prompts: read in a process of their own, embedded by transformers' own encoder."""
