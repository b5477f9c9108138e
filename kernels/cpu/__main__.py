"""`python -m kernels.cpu`: compiles the library for every target of this architecture.

Images run this when they are built, because they may start on any CPU and have no compiler.
"""

from __future__ import annotations

import sys

from kernels.cpu.shared_library import TARGETS, LibraryError, build, cache_directory


def main() -> int:
    """Compile into the cache. Return 0 if at least one target was compiled, else 1."""
    num_built = 0
    for target in TARGETS:
        try:
            print(build(target, cache_directory()))
            num_built += 1
        except LibraryError as error:  # for example a target of another architecture
            print(f"skipped {target.name}: {error}", file=sys.stderr)
    return 0 if num_built else 1


if __name__ == "__main__":
    sys.exit(main())
