"""Sections of `make gpu`; importable without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the GPU benchmark."""

    title: str
    module: str
    """Module of `benchmarks.gpu` with `run(bench)`, or `run(bench, case)` if there are cases."""
    seconds: int = 0
    """Time budget, after which the section starts no further measurement."""
    cases: Mapping[str, int] = field(default_factory=dict[str, int])
    """Cases that each run in their own process, with their time budgets in seconds."""
    baselines: tuple[str, ...] = ()
    """Cases that the others are compared with."""


SECTIONS = {
    "ceilings": Section("Peak copy and matmul rates", "ceilings", 10),
    "flashinfer": Section("FlashInfer build", "kernels.flashinfer", 180),
    "correctness": Section("Kernels against reference implementations", "kernels.correctness", 98),
    "decode": Section("Decode", "kernels.decode", 44),
    "latents": Section("Decode over latents (MLA)", "kernels.latents", 12),
    "expanded": Section("Prompts over latents (MLA)", "kernels.expanded", 4),
    "prefill": Section("Prefill", "kernels.prefill", 37),
    "elementwise": Section("Norms, gated activation, rotary embedding", "kernels.elementwise", 11),
    "sampling": Section("Sampling of 128k logits", "kernels.sampling", 6),
    "quantized": Section("Linear layers with quantized weights", "kernels.quantized", 9),
    "experts": Section("Quantized experts", "kernels.experts", 5),
    "states": Section("Layers that keep a state", "kernels.states", 8),
    "invariant": Section("Kernels of option.batch_invariant", "kernels.invariant", 6),
    "sweep": Section("Tile configurations", "kernels.sweep", 26),
    "serve": Section(
        "End to end with 50 concurrent clients",
        "engine.serve",
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
        "End to end with a tenth of the KV cache",
        "engine.small_pool",
        cases={"paged": 14, "continuous-oracle": 14, "continuous-max": 14},
        baselines=("continuous-oracle", "continuous-max"),
    ),
    "roofline": Section("Decode steps against their roofline", "engine.roofline", 22),
    "profile": Section("Time breakdown of a decode step", "engine.profile", 15),
    "mixed": Section("Steps with a prompt, as CUDA graphs and without, 0.6B", "engine.mixed", 28),
}


def jobs_of(names: Iterable[str]) -> list[str]:
    """Return the jobs of these sections in order: `section`, or `section/case`."""
    jobs: list[str] = []
    for name in names:
        jobs += [f"{name}/{case}" for case in SECTIONS[name].cases] or [name]
    return jobs


def section_of(job: str) -> str:
    return job.partition("/")[0]


def case_of(job: str) -> str:
    """Return the case of a job, or an empty string if its section has no cases."""
    return job.partition("/")[2]


def seconds_of(job: str) -> int:
    section, case = SECTIONS[section_of(job)], case_of(job)
    return section.cases[case] if case else section.seconds


def one_process(jobs: list[str], *, is_dry: bool) -> list[str]:
    """Return the first job and those after it that may share its process.

    A case gets its own process. A dry run, which measures nothing, runs all jobs in one process to
    save start-up time.
    """
    if is_dry:
        return jobs
    if case_of(jobs[0]):
        return jobs[:1]
    num_shared = next((n for n, job in enumerate(jobs) if case_of(job)), len(jobs))
    return jobs[:num_shared]
