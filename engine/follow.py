"""The process of a rank other than 0, which carries out rank 0's orders.

`python -m engine.follow ORDERS BEATS`: started by rank 0, on the same machine. The arguments are
file descriptors of connections to rank 0.

`python -m engine.follow --join ADDRESS MODEL_DIR PARENT`: on another machine, started by
`longshore join`, whose process id is PARENT. Waits for rank 0 at this address, HOST:PORT, with the
key in LONGSHORE_RANK_KEY.

Rank 0 sends the launch first. When the connections close, this process ends.

Exit codes: 0 if rank 0 has ended, 2 if it has another key or the arguments are wrong, 1 if this
rank fails.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from core.configuration.meeting_point import meeting_point
from core.configuration.options import Options
from core.errors import ConfigurationError
from core.foreign_code import contained
from core.process.internal_arguments import internal_arguments
from core.process.processes import die_with_parent
from engine.ranks.digest import digest_model
from engine.ranks.messages import AnyOrder, FailureReport, RankLaunch
from engine.ranks.tcp import join, local_interface
from engine.ranks.watch import OnLost, Watch

logger = logging.getLogger("engine.follow")  # also if it runs as __main__

READY = b"ready"


def main() -> int:
    """Follow rank 0's orders until it ends or this rank fails. Return the exit code."""
    arguments = internal_arguments(
        "engine.follow",
        "One rank of a model that several processes share. Rank 0 or `longshore join` starts it.",
        "ORDERS:int BEATS:int",
        "--join ADDRESS MODEL_DIR PARENT:int",
    )
    # A terminal's Ctrl-C reaches all ranks; rank 0 decides how to react to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if arguments[0] == "--join":
        address, model_dir, parent = arguments[1:]
        die_with_parent(int(parent))
        return _follow_from_afar(address, Path(model_dir))
    orders, beats = (Connection(int(fd)) for fd in arguments)
    return _follow(orders, beats, lambda launch: launch, lambda rank, report: os._exit(0))


def _follow_from_afar(address: str, model_dir: Path) -> int:
    try:
        place = meeting_point(Options(rank_address=address))
        orders, beats = join(
            place, lambda reason: logger.info("waiting for rank 0 at %s (%s)", place, reason)
        )
    except ConfigurationError as error:
        logger.error("%s", error)
        return error.exit_code
    logger.info("joined %s; waiting until all ranks have", place)

    def adapt(launch: RankLaunch) -> RankLaunch:
        logger.info("rank %d of %d", launch.rank, launch.size)
        # Resolved only now: a link may lead to another model than when this process started.
        own_dir = model_dir.resolve()
        if digest_model(own_dir) != launch.model_digest:
            raise ConfigurationError(
                f"the model in {own_dir} on this machine differs from rank 0's in "
                f"{launch.model_dir}: config.json or *.safetensors differ; put the same files on "
                "every machine, and start `longshore join` again if it downloads them"
            )
        own_address = msgspec.structs.replace(
            launch.address, host=place.host, interface=local_interface(orders)
        )
        return msgspec.structs.replace(launch, model_dir=str(own_dir), address=own_address)

    def on_lost(rank: int, report: bytes) -> None:
        logger.info("rank 0 at %s has ended, or does not answer", place)
        os._exit(0)

    return _follow(orders, beats, adapt, on_lost)


def _follow(
    orders: Connection,
    beats: Connection,
    adapt: Callable[[RankLaunch], RankLaunch],
    on_lost: OnLost,
) -> int:
    """Return the exit code. adapt: makes the launch fit this machine, and checks it."""
    try:
        message = orders.recv_bytes()
    except (EOFError, OSError):  # rank 0 has ended already
        return 0
    watch = Watch({0: beats}, on_lost)
    try:
        with contained:
            _run(orders, adapt(RankLaunch.decode(message)))
    except EOFError:
        return 0
    except Exception as error:
        watch.stop()
        try:
            beats.send_bytes(msgspec.msgpack.encode(FailureReport.of(error)))
        except OSError:  # rank 0 has ended, which made this rank fail
            return 0
        return 1
    return 0


def _run(orders: Connection, launch: RankLaunch) -> None:
    """Build this rank's parts and obey orders. Raises EOFError if rank 0 closes the connection."""
    gc.disable()  # as in engine/__main__.py
    # Imported here, so that the watch already answers during these imports.
    from engine.device import choose_device, explaining_out_of_memory
    from engine.loading.packed_model import PackedModel
    from engine.parts import build_parts
    from engine.phases import Phases
    from engine.ranks.group import ProcessGroup, open_store
    from engine.ranks.shard import Shard
    from engine.step.follower import Follower

    gc.freeze()
    gc.enable()
    device = choose_device(launch.options)
    store = open_store(launch.address, launch.size)
    orders.send_bytes(READY)
    group = ProcessGroup(Shard(launch.rank, launch.size), device, launch.address, store)
    with explaining_out_of_memory():  # if memory runs out in a step, the engine restarts instead
        parts = build_parts(Path(launch.model_dir), launch.options, device, Phases(), group)
    model, packed = parts.model, parts.packed
    assert isinstance(model, PackedModel), "only a packed model runs on several ranks"
    assert packed is not None, "a packed model has a KV cache"
    follower = Follower(model, packed.kv_cache, packed.backend, packed.graphs, group)
    decode = msgspec.msgpack.Decoder[AnyOrder](AnyOrder).decode
    while True:
        follower.run(decode(orders.recv_bytes()))


if __name__ == "__main__":
    sys.exit(main())
