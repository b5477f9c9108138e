"""The paths that tell whether the model can answer requests."""

HEALTH_PATHS = ("/ping", "/health", "/health/live", "/health/ready")
"""SageMaker's path, and those of other servers and of Kubernetes' probes. All answer the same."""
