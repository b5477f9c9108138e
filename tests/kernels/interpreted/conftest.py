"""Repairs the interpreter before this folder's tests define kernels."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.interpreter import repair

    repair()
