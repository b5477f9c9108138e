"""Records which kernels would be launched. Nothing is compiled."""

from __future__ import annotations

from unittest.mock import patch

from triton import knobs

from kernels import dry_run

ARCH = 86
NO_DEVICE = 1000
"""Has no compiled kernels."""


def kernels(launch, arch=ARCH):
    """Return the names of the kernels that a function launches, each with the key by which Triton
    looks up the compiled kernel."""
    found = set()

    def record(*, key, fn, **_):
        found.add((fn.name.rpartition(".")[2], key))
        return True  # do not compile it

    with (
        knobs.runtime.scope(),
        patch.object(dry_run.FakeCuda, "get_current_device", lambda _: NO_DEVICE),
        dry_run.target(arch),
    ):
        knobs.runtime.jit_cache_hook = record
        launch()
    return found
