"""SageMaker's `/invocations`, its sessions, and the routes of the SageMaker runtime API."""
