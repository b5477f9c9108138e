"""The process of a rank other than 0, which carries out rank 0's orders.

`python -m engine.follow STORE RANK MODEL_DIR --orders FD`: started by rank 0, on its machine. The
orders come through a pipe with this file descriptor.

`python -m engine.follow STORE RANK MODEL_DIR --parent PARENT`: on another node, started by the
process with this id. The orders come through gloo.

STORE is the address of the store in rank 0's process, HOST:PORT. This process ends when the store,
the pipe or the parent does.

Exit codes: 0 if rank 0 has ended, 2 if the arguments are wrong, 1 if this rank fails.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from core.errors import ConfigurationError
from core.foreign_code import contained
from core.process.internal_arguments import internal_arguments
from core.process.processes import die_with_parent
from engine.ranks.order_types import LAUNCH, READY, AnyOrder, FailureReport, RankLaunch
from engine.ranks.watch import Beats

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


def main() -> int:
    """Follow rank 0's orders until it ends or this rank fails. Return the exit code."""
    address, rank, model_dir, source, number = internal_arguments(
        "engine.follow",
        "One rank of a model that several processes share. Rank 0 or a fleet starts it.",
        "STORE RANK:int MODEL_DIR --orders FD:int",
        "STORE RANK:int MODEL_DIR --parent PARENT:int",
    )
    # A terminal's Ctrl-C reaches all ranks; rank 0 decides how to react to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # Otherwise torch writes a stack trace when rank 0 has ended.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    pipe = None
    if source == "--orders":
        pipe = Connection(int(number), writable=False)
    else:
        die_with_parent(int(number))
    gc.disable()  # as in engine/__main__.py
    from engine.ranks.store import FOREVER, OPEN, open_store

    try:
        store = open_store(address, FOREVER if pipe is None else OPEN)
    except RuntimeError:  # rank 0, which had opened the store and then started this process
        return 0
    beats = Beats(store, int(rank))
    try:
        with contained:
            _run(store, address, int(rank), Path(model_dir), pipe)
    except EOFError:
        beats.stop()
        return 0
    except Exception as error:
        try:
            beats.stop(FailureReport.of(error).encode())
        except RuntimeError:  # rank 0 has ended, which made this rank fail
            return 0
        return 1


def _run(
    store: TCPStore, address: str, rank: int, model_dir: Path, pipe: Connection | None
) -> NoReturn:
    """Build this rank's parts and obey orders. Raises EOFError if rank 0 closes the pipe."""
    # Imported here, so that this process beats during these imports.
    from engine.build import load
    from engine.builders.packed import build_parts
    from engine.device import choose_device, explaining_out_of_memory
    from engine.phases import Phases
    from engine.ranks.follower import Follower
    from engine.ranks.orders import RemoteOrders
    from engine.ranks.process_group import join_group
    from engine.shard import Shard

    gc.freeze()
    gc.enable()
    launch = RankLaunch.decode(store.get(LAUNCH))
    _require_same_model(launch, model_dir)
    device = choose_device(launch.options.execution)
    store.add(READY, 1)
    shard, options = Shard(rank, launch.size), launch.options
    receive = (
        pipe.recv_bytes if pipe else RemoteOrders(address, shard, options.layout.nodes).receive
    )
    group = join_group(shard, device, address, options.execution)
    phases = Phases()
    with explaining_out_of_memory():  # if memory runs out in a step, the engine restarts instead
        loaded = load(model_dir, options, device, phases, group)
        model = loaded.model
        assert model is not None, "only a packed model runs on several ranks"
        parts = build_parts(loaded.resolved, model, phases, group)
    follower = Follower(parts.passes, parts.columns, group, parts.features)
    decode = msgspec.msgpack.Decoder[AnyOrder](AnyOrder).decode
    while True:
        follower.run(decode(receive()))


def _require_same_model(launch: RankLaunch, model_dir: Path) -> None:
    """Raise ConfigurationError if the weights on this node differ from rank 0's."""
    from engine.digest import digest_model

    if launch.model_digest and digest_model(model_dir) != launch.model_digest:
        raise ConfigurationError(
            f"the model in {model_dir} on this node differs from rank 0's: config.json or "
            "*.safetensors differ; put the same files on every node"
        )


if __name__ == "__main__":
    sys.exit(main())
