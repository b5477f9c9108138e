"""The application for a config file of Serve, such as that of a RayService of Kubernetes.

```yaml
import_path: longshore.deploy.fleet.serve_config:build
args: {flags: --properties FILE --replicas 2, nodes: 3, gpus_per_node: 1}
```
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ray.serve import Application

from core.errors import ConfigurationError
from deploy.fleet.application import application, fleet_of
from deploy.fleet.arguments import parse_flags
from deploy.fleet.properties import read_options
from deploy.fleet.span import span_of

_TYPES = {"flags": str, "nodes": int, "gpus_per_node": int}


def build(arguments: Mapping[str, Any]) -> Application:
    """Return the application that `fleet serve` would deploy. Serve calls this.

    arguments: the `flags` of `fleet serve`, except `--address`, `--local-nodes` and `--port`; the
    number of `nodes` of the cluster; and `gpus_per_node`, the GPUs of its largest node. Nodes and
    GPUs cannot be counted, since some nodes may not have started yet.

    Raises ConfigurationError if a container could not start with the properties, or has no room.
    """
    for name, kind in _TYPES.items():
        if not isinstance(arguments.get(name), kind):
            raise ConfigurationError(
                f"args: {name} is {arguments.get(name)!r}; expected {kind.__name__}, as in "
                "{flags: --properties FILE --replicas 2, nodes: 3, gpus_per_node: 1}"
            )
    if unknown := arguments.keys() - _TYPES.keys():
        raise ConfigurationError(
            f"args: unknown: {', '.join(sorted(unknown))}; known are {', '.join(_TYPES)}"
        )
    parsed = parse_flags(shlex.split(arguments["flags"]))
    options = read_options(parsed.properties)
    nodes: int = arguments["nodes"]
    span = span_of(options, [arguments["gpus_per_node"]] * nodes)
    return application(fleet_of(parsed, options), span, nodes)
