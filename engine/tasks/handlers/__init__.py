"""The user's own model.py, by DJL's or SageMaker's handler interface."""
