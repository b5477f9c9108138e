"""One model of several: a single-model container that serves on a Unix socket.

`python -m container.multi_model.child URL NAME SOCKET SHARE_OF_OTHERS`
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from container.configuration.report import refuse
from container.configuration.resolve import Configuration, load_configuration
from container.launch.preparation import prepare
from container.launch.supervisor import supervise
from container.models.directory import open_model_dir, properties_beside
from core.errors import ConfigurationError
from core.processes import die_with_parent


def main(url: str, name: str, socket: str, share_of_others: str) -> int:
    """Serves until SIGTERM; the exit code of `serve`."""
    die_with_parent()
    try:
        model_dir = open_model_dir(Path(url))
        configuration = load_configuration(properties_beside(model_dir), os.environ)
        configuration = beside_others(configuration, float(share_of_others))
        prepared = prepare(configuration, model_dir)
        return supervise(configuration, prepared, 0, socket=Path(socket), name=name)
    except ConfigurationError as error:
        return refuse(error)


def beside_others(configuration: Configuration, share: float) -> Configuration:
    """The same for an engine on a GPU of which other models have this share.

    An engine counts all that is used of a GPU against its option.gpu_memory_utilization, whoever
    uses it; so the shares of the others are added to its own.
    """
    if not share:
        return configuration
    own = configuration.options.gpu_memory_utilization
    note = (
        f"option.gpu_memory_utilization={own:g} of this model comes on top of {share:g} for the "
        "others on its GPU"
    )
    return dataclasses.replace(
        configuration,
        options=dataclasses.replace(
            configuration.options, gpu_memory_utilization=min(1.0, own + share)
        ),
        warnings=(*configuration.warnings, note),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
