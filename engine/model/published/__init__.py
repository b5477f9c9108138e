"""What a model's published config.json says, in the words of our own decoder."""
