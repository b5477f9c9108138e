"""`python -m kernels.cpu`: compiles for every CPU of this architecture, into the cache.

For an image, which may start on any of them and has no compiler.
"""

from __future__ import annotations

import sys

from kernels.cpu.library import TARGETS, LibraryError, build, cache_directory


def main() -> int:
    built = 0
    for target in TARGETS:
        try:
            print(build(target, cache_directory()))
            built += 1
        except LibraryError as error:  # such as a compiler of another architecture
            print(f"not for {target.name}: {error}", file=sys.stderr)
    return 0 if built else 1


if __name__ == "__main__":
    sys.exit(main())
