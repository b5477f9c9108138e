"""Deploy this container to SageMaker endpoints with boto3: `python -m deploy --help`.

Imports nothing from the server.
"""
