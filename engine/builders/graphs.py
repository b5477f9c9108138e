"""Captures an engine's steps as CUDA graphs."""

from __future__ import annotations

import sys

from tqdm import tqdm

from core.configuration.step_size import graph_sizes
from core.errors import ConfigurationError, InsufficientMemoryError
from engine.attention.backends import AttentionBackend, TorchBackend
from engine.attention.kv_cache import KVCache
from engine.device import is_out_of_memory
from engine.group import Group
from engine.loading.packed_model import PackedModel
from engine.resolve import Capacity, Resolved
from engine.step.cuda_recorder import CudaRecorder
from engine.step.step_graphs import MAX_CAPTURE_SECONDS, StepGraphs


def capture(
    model: PackedModel,
    cache: KVCache,
    backend: AttentionBackend,
    resolved: Resolved,
    capacity: Capacity,
    group: Group,
) -> tuple[StepGraphs | None, tuple[str, ...]]:
    """Capture the graphs. Return them, or None if steps must run without graphs, and notes.

    group: all of it must have the same graphs.

    Raises InsufficientMemoryError if the graphs do not fit, and ConfigurationError if a group of
    several cannot capture them.
    """
    prompt_sizes = resolved.graph_prompt_sizes
    assert prompt_sizes is not None, "the options do not leave out graphs"
    if isinstance(backend, TorchBackend):
        return None, ()
    shows_progress = sys.stderr.isatty() and group.rank == 0
    sizes = graph_sizes(
        resolved.limits.max_sequences,
        capacity.max_step_tokens,
        prompt_sizes,
        resolved.num_drafts,
    )
    try:
        graphs = StepGraphs(
            model,
            cache,
            backend,
            CudaRecorder(),
            sizes,
            max_model_len=capacity.max_model_len,
            skips_device_bound=resolved.measures_graphs,
            progress=lambda rows: tqdm(rows, desc="CUDA graphs", disable=not shows_progress),
            agree=group.agree,
        )
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise InsufficientMemoryError(
                "the CUDA graphs do not fit beside the weights and the KV cache; lower "
                "option.gpu_memory_utilization or option.max_rolling_batch_size, or set "
                "option.enforce_eager=true"
            ) from error
        reason = str(error).partition("\n")[0]
        if group.size > 1:
            raise ConfigurationError(
                f"the CUDA graphs cannot be captured: {reason}; set option.enforce_eager=true"
            ) from error
        return None, (f"steps run without CUDA graphs: {reason}",)
    return graphs, _graph_notes(graphs)


def _graph_notes(graphs: StepGraphs) -> tuple[str, ...]:
    """Return why steps with prompts have no graph in some sizes."""
    notes: list[str] = []
    if graphs.num_timed_out:
        notes.append(
            f"{graphs.num_timed_out} sizes of steps with prompts have no CUDA graph: capturing "
            f"stopped after {MAX_CAPTURE_SECONDS:.0f} s; shorten option.cuda_graph_sizes"
        )
    if graphs.num_device_bound:
        notes.append(
            f"{graphs.num_device_bound} sizes of steps with prompts have no CUDA graph, which "
            "would not help: their kernels take longer to run than to launch"
        )
    return tuple(notes)
