"""User-provided model.py, with DJL Serving's or SageMaker's handler interface."""
