"""The paths that tell whether the model can answer requests."""

HEALTH_PATHS = ("/ping", "/health", "/health/live", "/health/ready")
"""SageMaker's path, other servers' paths and those of Kubernetes' probes, which answer the same."""
