"""The GPUs for which this folder's tests compile kernels."""

from __future__ import annotations

import os

from kernels import dry_run

ALL = os.environ.get("LONGSHORE_ALL_VARIANTS") == "1"
"""Whether to compile every variant for every GPU (`make variants`), and not a sample."""
ARCHS = dry_run.ARCHS if ALL else (86, 90)
"""For sm_80 and sm_89, the compiler does mostly the same as for sm_86 and sm_90."""
