"""Measure the time of each start-up phase, and the peak of host memory.

Only anonymous memory counts, as the kernel can reclaim pages mapped from files. The KV cache is
small, so the peak shows the weights and the overhead of loading them. Linux only.

    python -m benchmarks.engine.start models/demo
    python -m benchmarks.engine.start ~/llama --dtype bf16 --load-format dummy
"""

from __future__ import annotations

import argparse
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.configuration.options import make_options
from engine.phases import Phases

POLL_S = 0.002
MIB = 2**20
KV_BYTES = 16 * MIB


class Peak:
    """The most by which this process's anonymous memory grows during `watching`."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._is_over = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        watcher = threading.Thread(target=self._watch, args=(anonymous_bytes(),), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self._is_over.set()
            watcher.join()

    def _watch(self, before: int) -> None:
        while True:
            self.num_bytes = max(self.num_bytes, anonymous_bytes() - before)
            if self._is_over.wait(POLL_S):
                return


def anonymous_bytes() -> int:
    """Return the resident anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None, "RssAnon needs Linux 4.5 or later"
    return int(found[1]) * 1024


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    phases, peak = Phases(), Peak()
    from engine.build import build_engine  # importing it is the first phase

    phases.end("imports")
    with peak.watching():
        engine = build_engine(
            options.model,
            make_options({
                "dtype": options.dtype,
                "load_format": options.load_format,
                "kv_cache_memory_bytes": KV_BYTES,
            }),
            phases,
        )  # fmt: skip
    facts = engine.facts
    for name, seconds in phases.seconds.items():
        print(f"{seconds:8.2f} s  {name}")
    print(f"{sum(phases.seconds.values()):8.2f} s  total; decoder: {facts.decoder}")
    print(f"{facts.weights_bytes / MIB:8,.0f} MiB  weights")
    kv_mib = facts.kv_bytes / MIB
    print(f"{peak.num_bytes / MIB:8,.0f} MiB  peak, including {kv_mib:,.0f} MiB of KV cache")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="model directory in Hugging Face format")
    parser.add_argument("--dtype", default="fp32", help="option.dtype (default: %(default)s)")
    parser.add_argument(
        "--load-format",
        default="auto",
        choices=["auto", "dummy"],
        help="option.load_format (default: %(default)s)",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
