"""SageMaker endpoints with boto3: `longshore deploy --help`. Imports nothing from the server."""
