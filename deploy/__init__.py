"""Deploy this container: to SageMaker endpoints, to Kubernetes, or as a fleet on Ray.

Except for the fleet, nothing here imports the server.
"""
