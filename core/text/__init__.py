"""Text on both sides of the tokens; used by the front end and by the offline LLM class."""
