"""What `make gpu` consists of; read without loading torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    module: str
    """Of this package; its `run(bench)` measures, or `run(bench, case)` where there are cases."""
    seconds: int = 0
    """After which it starts no further measurement."""
    cases: Mapping[str, int] = field(default_factory=dict[str, int])
    """Parts that run in a process of their own each, and the seconds of each."""
    baselines: tuple[str, ...] = ()
    """Cases that the others are compared with."""


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
    "sweep": Section("Configurations", "sweep", 35),
    "serve": Section(
        "50 clients at once, end to end",
        "serve",
        cases={
            "paged": 17,
            "generate": 19,
            "generate_batch": 24,
            "dynamic": 17,
            "continuous": 16,
            "none": 15,
        },
        baselines=("generate", "generate_batch"),
    ),
    "small-pool": Section(
        "The same over a tenth of the KV memory",
        "small_pool",
        cases={"paged": 14, "continuous-oracle": 14, "continuous-max": 14},
        baselines=("continuous-oracle", "continuous-max"),
    ),
    "roofline": Section("A decode step against its roofline", "roofline", 22),
    "profile": Section("Where the time of a decode step goes", "profile", 15),
}
START_SECONDS = 6
"""For a process to start and load its libraries, which no section's seconds include."""
LIMIT_SECONDS = 540
"""All of it, but for the time that FlashInfer may take to build."""


def jobs_of(names: Iterable[str]) -> list[str]:
    """What is to be run for these sections, in order: `section`, or `section/case`."""
    found: list[str] = []
    for name in names:
        found += [f"{name}/{case}" for case in SECTIONS[name].cases] or [name]
    return found


def section_of(job: str) -> str:
    return job.partition("/")[0]


def case_of(job: str) -> str:
    """Empty where the section has none."""
    return job.partition("/")[2]


def seconds_of(job: str) -> int:
    section, case = SECTIONS[section_of(job)], case_of(job)
    return section.cases[case] if case else section.seconds


def one_process(jobs: list[str], *, is_dry: bool) -> list[str]:
    """The first of these jobs, and those after it that may share its process.

    A case has one to itself. A dry run is about the code alone, and saves the time to start.
    """
    if is_dry:
        return jobs
    if case_of(jobs[0]):
        return jobs[:1]
    num_shared = next((n for n, job in enumerate(jobs) if case_of(job)), len(jobs))
    return jobs[:num_shared]
