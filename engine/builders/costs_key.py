"""Names all that the costs of steps depend on, so that a later start need not measure them."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from core.configuration.step_size import StepSize, graph_sizes
from engine.builders.drafting import Drafting
from engine.digest import kernels_digest
from engine.loading.packed_model import PackedModel
from engine.resolve import Capacity, Resolved


def costs_key(
    resolved: Resolved, model: PackedModel, capacity: Capacity, draft: Drafting | None
) -> str:
    """Return a digest of the machine, the models, the limits and the options that matter."""
    parts = [
        *_machine(resolved.source.device),
        (model.config.to_json_string(), model.description, model.dtype),
        *([] if draft is None else [draft.identity]),
        model.quantization,
        resolved.num_ranks,
        resolved.kv_dtype,
        _graphs(resolved, capacity),
        resolved.overlaps,
        resolved.num_drafts,
        capacity.layout,
        capacity.max_model_len,
        capacity.max_step_tokens,
        capacity.max_sequences,
        capacity.num_states,
        resolved.memory.state_dtype,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _graphs(resolved: Resolved, capacity: Capacity) -> list[StepSize]:
    if resolved.graph_prompt_sizes is None:
        return []
    return graph_sizes(
        capacity.max_sequences,
        capacity.max_step_tokens,
        resolved.graph_prompt_sizes,
        resolved.num_drafts,
    )


def _machine(device: torch.device) -> Iterator[object]:
    yield torch.__version__
    yield from kernels_digest(str(device))
    yield torch.get_num_threads(), len(os.sched_getaffinity(0))
    yield _processor()
    if device.type == "cuda":
        yield torch.cuda.get_device_name(device)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
