"""SageMaker endpoints of this container, on boto3: `python -m deploy --help`.

Imports nothing of the server: it sends an image, files and settings, and calls what runs.
"""
