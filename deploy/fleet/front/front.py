"""The front: Ray's actor that runs the gateway, and reaches the replicas through Serve."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from ray import serve
from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deploy.fleet.front.gateway import Gateway, Parts, Replicas
from deploy.fleet.http_message import Head, ReplicaLostError, Request

METRICS_TIMEOUT_S = 2.0
"""How long to wait for a replica's metrics. Slower replicas are left out."""


@serve.ingress()
class Front:
    """Serve's ingress. Each front routes by the requests it has sent and the replicas' reports."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self._replicas = replicas
        self._exchange = replicas.options(method_name="exchange", stream=True)
        self._max_body_bytes = max_body_bytes

    def __serve_build_asgi_app__(self) -> Gateway:
        replicas = Replicas(self._exchange_with_replica, self._fetch_from_all)
        return Gateway(replicas, self._max_body_bytes)

    async def _exchange_with_replica(self, request: Request) -> Parts:
        parts = self._exchange.remote(request)
        try:
            async for part in parts:
                yield part
        except (RayActorError, ObjectLostError) as error:
            raise ReplicaLostError(type(error).__name__) from None
        except BaseException:  # the client has left
            parts.cancel()
            raise

    async def _fetch_from_all(self, request: Request) -> Sequence[tuple[str, Head, bytes]]:
        try:
            answers = await self._replicas.broadcast(
                "fetch", request, METRICS_TIMEOUT_S
            ).results_async(timeout_s=2 * METRICS_TIMEOUT_S, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError):
            return []
        complete = (answer for answer in answers if not isinstance(answer, BaseException))
        return sorted(complete, key=itemgetter(0))
