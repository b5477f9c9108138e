"""SageMaker's and OpenAI's lists of models."""
