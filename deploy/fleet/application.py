"""The Serve application: gateways, and behind them replicas of the container."""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from core.configuration.options import Options
from deploy.fleet.front.front import Front
from deploy.fleet.front.router import ReplicaRouter
from deploy.fleet.replica import Replica
from deploy.fleet.span import NodeSpan

NAME = "longshore"
_UNLIMITED = 100_000
"""Requests that Serve may send to a replica. The container refuses those beyond its own limits."""
_ROUTING_STATS_PERIOD_S = 1.0
_HEALTH_CHECK_PERIOD_S = 2.0
QUIET = {"enable_access_log": False}
"""The containers log requests (option.log_requests), so Serve does not."""
_NUM_STARTS = 3
"""How often Serve tries to start a replica before it gives up."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The settings of a fleet, from the flags of `fleet serve`."""

    properties: Path
    """The serving.properties, at the same path on every node."""
    options: Options
    """The options in the properties."""
    min_replicas: int
    max_replicas: int
    cpus: float
    """CPU cores of a replica, on each of its nodes."""
    grace_s: float
    """Time for requests to finish on a replica that stops."""
    surge_percent: int
    """Replicas that an update starts before old ones stop, in percent of all; rounded up."""
    router: str
    """A name in core.routing.ROUTERS."""

    def cpus_of_node(self, num_nodes: int) -> int:
        """Return the CPU cores that each of `num_nodes` equal nodes needs for an update.

        The update starts new replicas while max_replicas are running.
        """
        surge = math.ceil(self.max_replicas * self.surge_percent / 100)
        num_parts = (self.max_replicas + surge) * self.options.layout.nodes
        return math.ceil(math.ceil(num_parts / num_nodes) * self.cpus)


def fleet_of(parsed: argparse.Namespace, options: Options) -> Fleet:
    """Return the fleet that the flags of `serve` describe. options: those in the properties."""
    min_replicas, max_replicas = parsed.autoscale or (parsed.replicas, parsed.replicas)
    return Fleet(
        # Do not resolve the path: a ConfigMap's links lead to another folder in each pod.
        properties=parsed.properties.absolute(),
        options=options,
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        cpus=parsed.cpus,
        grace_s=parsed.grace,
        surge_percent=parsed.surge,
        router=parsed.router,
    )


def application(fleet: Fleet, span: NodeSpan, num_fronts: int) -> serve.Application:
    """Return the application. Deploying it again is a rolling update.

    span: the nodes that a replica takes.
    """
    replicas = serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options={"num_cpus": fleet.cpus, "num_gpus": span.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=ReplicaRouter,
            request_router_kwargs={"router": fleet.router},
            request_routing_stats_period_s=_ROUTING_STATS_PERIOD_S,
        ),
        max_constructor_retry_count=_NUM_STARTS,
        max_surge_percent=fleet.surge_percent,
        **_placement(fleet, span),
        **_scale(fleet),
        **_lifetime(fleet),
    )
    front = serve.deployment(
        Front,
        name="Front",
        num_replicas=num_fronts,
        ray_actor_options={"num_cpus": 0},
        max_surge_percent=100,
        **_lifetime(fleet),
    )
    return front.bind(
        replicas.bind(str(fleet.properties), fleet.cpus), fleet.options.server.max_request_size
    )


def _placement(fleet: Fleet, span: NodeSpan) -> dict[str, Any]:
    """Return the settings of a placement group, if a replica may need several nodes."""
    if span.bundles == 1:
        return {}
    bundles, strategy = span.placement(fleet.cpus)
    return {"placement_group_bundles": bundles, "placement_group_strategy": strategy}


def _scale(fleet: Fleet) -> dict[str, Any]:
    if fleet.min_replicas == fleet.max_replicas:
        return {"num_replicas": fleet.min_replicas}
    # A replica runs this many requests at a time. Further requests would wait in it.
    options = fleet.options
    scaling = AutoscalingConfig(
        min_replicas=fleet.min_replicas,
        max_replicas=fleet.max_replicas,
        target_ongoing_requests=options.layout.copies * options.strategy.max_rolling_batch_size,
    )
    return {"autoscaling_config": scaling}


def _lifetime(fleet: Fleet) -> dict[str, Any]:
    return {
        "max_ongoing_requests": _UNLIMITED,
        "graceful_shutdown_timeout_s": fleet.grace_s,
        "health_check_period_s": _HEALTH_CHECK_PERIOD_S,
        "logging_config": QUIET,
    }
