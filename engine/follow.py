"""`python -m engine.follow ORDERS BEATS`: a rank other than 0. Started by `engine.ranks.followers`.

The arguments are file descriptors of connections to rank 0, which sends the launch first. When they
close, this process ends.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from engine.ranks.messages import AnyOrder, LastWords, RankLaunch
from engine.ranks.watch import Watch

READY = b"ready"


def main() -> int:
    """Follow rank 0's orders until it ends or this rank fails. Return the exit code."""
    # A terminal's Ctrl-C reaches all ranks; rank 0 decides what follows from it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    orders, beats = (Connection(int(fd)) for fd in sys.argv[1:3])
    watch = Watch({0: beats}, lambda rank, words: os._exit(0))
    try:
        _follow(orders)
    except EOFError:
        return 0
    except Exception as error:
        watch.stop()
        try:
            beats.send_bytes(msgspec.msgpack.encode(LastWords.of(error)))
        except OSError:  # rank 0 has ended, which is why this one failed
            return 0
        return 1
    return 0


def _follow(orders: Connection) -> None:
    """Raises EOFError when rank 0 closes the connection."""
    launch = msgspec.msgpack.decode(orders.recv_bytes(), type=RankLaunch)
    gc.disable()  # as in engine/__main__.py
    # Imported here, so that the watch answers meanwhile.
    from engine.device import choose_device, explaining_out_of_memory
    from engine.loading.packed_model import PackedModel
    from engine.parts import build_parts
    from engine.phases import Phases
    from engine.ranks.group import ProcessGroup
    from engine.ranks.shard import Shard
    from engine.step.follower import Follower

    gc.freeze()
    gc.enable()
    device = choose_device(launch.options)
    orders.send_bytes(READY)
    shard = Shard(launch.rank, launch.size)
    group = ProcessGroup(shard, device, Path(launch.store), launch.timeout_s)
    with explaining_out_of_memory():  # in a step, it is a failure after which the engine restarts
        parts = build_parts(Path(launch.model_dir), launch.options, device, Phases(), group)
    model, kv = parts.model, parts.kv
    assert isinstance(model, PackedModel), "others run on one rank"
    assert kv is not None, "a packed model has a KV cache"
    follower = Follower(model, kv.cache, kv.backend, kv.graphs, group)
    decode = msgspec.msgpack.Decoder[AnyOrder](AnyOrder).decode
    while True:
        follower.run(decode(orders.recv_bytes()))


if __name__ == "__main__":
    sys.exit(main())
