"""Text before and after the model: used by the front end and by the offline LLM class."""
