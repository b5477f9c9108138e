"""Repairs the interpreter before any kernel of this folder's tests is defined."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.interpreter import repair

    repair()
