"""SageMaker's `/invocations`, sessions, and the routes of SageMaker's runtime."""
