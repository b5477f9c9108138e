"""What OpenAI's APIs share: their envelope and common fields."""
