"""What `make gpu` consists of; read without loading torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    module: str
    """Of this package; its `run(bench)` measures."""
    seconds: int
    """After which it starts no further case; together under five minutes, but for the time that
    FlashInfer may take to build."""


SECTIONS = {
    "ceilings": Section("What this GPU can do at best", "ceilings", 10),
    "flashinfer": Section("FlashInfer", "flashinfer", 120),
    "correctness": Section("Kernels against their definition", "correctness", 60),
    "decode": Section("Decode", "decode", 65),
    "prefill": Section("Prefill", "prefill", 40),
    "moves": Section("Cache write, block copy, swap", "moves", 15),
    "elementwise": Section("Norms, gated activation, rotary embedding", "elementwise", 10),
    "flex": Section("FlexAttention over its own pages of 128", "flex", 35),
    "splits": Section("Decode by number of splits", "splits", 15),
    "sweep": Section("Configurations", "sweep", 45),
}
