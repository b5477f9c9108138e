"""Runs the container that answers a batch, on a Unix socket.

`python -m container.batch.serve_batch PARENT MODEL_DIR PROPERTIES SOCKET NUM_WORKERS FLAGS`

PARENT is the id of the process that starts this one; this process ends when the parent ends. If
MODEL_DIR or PROPERTIES is empty, its default is used. FLAGS are the flags of the command line, as
JSON.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import msgspec

from container.configuration.properties import Setting
from container.configuration.report import report_error
from container.configuration.resolve import Configuration, load_configuration
from container.launch.preparation import prepare
from container.launch.supervisor import supervise
from container.model_files.directory import default_model_dir, find_properties, open_model_dir
from core.errors import ConfigurationError
from core.process.internal_arguments import internal_arguments
from core.process.processes import die_with_parent, until_stopped

NO_TIMEOUT_S = 10**8


def main(
    parent: str, model_dir: str, properties: str, socket: str, num_workers: str, flags: str
) -> int:
    """Serve until SIGTERM and return the exit code, as `serve` does."""
    die_with_parent(int(parent))
    try:
        opened = open_model_dir(Path(model_dir) if model_dir else default_model_dir())
        path = Path(properties) if properties else find_properties(opened)
        configuration = for_batch(
            load_configuration(path, os.environ, msgspec.json.decode(flags, type=list[Setting])),
            int(num_workers),
        )
        return supervise(configuration, prepare(configuration, opened), 0, socket=Path(socket))
    except ConfigurationError as error:
        return report_error(error)


def for_batch(configuration: Configuration, num_workers: int) -> Configuration:
    """Return the configuration for a server whose only client is the batch.

    Requests may wait for any time, since the client does not give up, and need no API key. A full
    queue is a 503, after which the batch tries again.
    """
    options = configuration.options
    return dataclasses.replace(
        configuration,
        options=options.changed(
            predict_timeout=NO_TIMEOUT_S,
            job_queue_size=max(options.server.job_queue_size, num_workers),
            api_keys_file=None,
            ssl_certfile=None,
            ssl_keyfile=None,
            overload_status="503",
            ui="false",
        ),
    )


if __name__ == "__main__":
    description = "The container that answers a batch. `longshore batch` starts it."
    form = "PARENT:int MODEL_DIR PROPERTIES SOCKET NUM_WORKERS:int FLAGS"
    arguments = internal_arguments("container.batch.serve_batch", description, form)
    sys.exit(until_stopped(lambda: main(*arguments)))
