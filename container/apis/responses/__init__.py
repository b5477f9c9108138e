"""OpenAI's responses, without their storage."""
