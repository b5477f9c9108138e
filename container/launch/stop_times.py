"""How long the parts of a container may take to stop, in this order.

SageMaker kills a container 30 s after SIGTERM.
"""

RUNNING_REQUESTS_S = 23
"""Time for running requests to end by themselves."""
FAILED_REQUESTS_S = 2
"""Time for the requests that still run then to end with an error."""
FRONT_END_STOP_S = RUNNING_REQUESTS_S + FAILED_REQUESTS_S + 1.0
"""Time for the front end's processes to exit, requests included."""
ENGINE_STOP_S = 3.0
