"""Build the engine that serves a task other than text generation."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from core.configuration.batching import DEFAULT_STEP_TOKENS, sequence_limit
from core.configuration.kv_layout import KVLayout
from core.configuration.options import Options
from core.configuration.task import Task, check_options, choose_batching_of
from core.protocol.facts import Facts
from engine.device import choose_device, use_expandable_segments
from engine.ranks.degree import notes_on_one_rank
from engine.tasks.engine import MAX_STEPS, TaskEngine
from engine.tasks.handlers.handler import load_handler
from engine.tasks.performer import Performer
from strategies.base import Limits
from strategies.factory import StrategySettings, make_strategy

_TOKENS_PER_JOB = 1 + MAX_STEPS
"""To the strategy, whose blocks hold a job each: see `TaskEngine`."""


def build_task_engine(task: Task, model_dir: Path, options: Options) -> TaskEngine:
    """Load the performer of `task` and return an engine for it.

    `task` must not be text generation. Raises ConfigurationError if the task, the options and the
    model do not fit together.
    """
    started = time.monotonic()
    check_options(task, options)
    device = choose_device(options.execution)
    notes = notes_on_one_rank(options.execution, device)
    if device.type == "cuda":
        use_expandable_segments()
    performer = _load_performer(task, model_dir, options, device)
    choice = choose_batching_of(task, options)
    assert choice.name is not None, "only text generation leaves the strategy undecided"
    batching = choice.name
    max_jobs = sequence_limit(options.strategy, batching)
    description = performer.description
    facts = Facts(
        model=str(model_dir),
        task=task.name,
        architecture=description.architecture,
        batching=batching,
        batching_reason=choice.reason,
        executor="task",
        executor_reason=task.reason,
        device=str(device),
        dtype=description.dtype,
        encoder=description.encoder,
        max_model_len=description.max_model_len,
        max_sequences=max_jobs,
        weights_bytes=description.weights_bytes,
        load_seconds=time.monotonic() - started,
        notes=notes + description.notes,
    )
    settings = StrategySettings(
        batching=batching,
        num_blocks=max_jobs,
        layout=KVLayout.uniform(_TOKENS_PER_JOB),
        max_model_len=_TOKENS_PER_JOB,
        limits=Limits(max_sequences=max_jobs, max_step_tokens=max_jobs),
        max_delay_s=options.strategy.max_batch_delay / 1000,
        kv_reservation="max",
        enable_prefix_caching=False,
        preemption_mode="recompute",
        num_swap_blocks=0,
    )
    return TaskEngine(make_strategy(settings), performer, facts)


def _load_performer(
    task: Task, model_dir: Path, options: Options, device: torch.device
) -> Performer:
    if task.kind == "handler":
        return _load_handler(task, model_dir, device)
    # Only here: importing transformers' models takes over a second, and many handlers need none.
    from engine.loading.open_model import make_source, read_config
    from engine.tasks.embedding.embedder import Embedder
    from engine.tasks.pipelines.pipelines import PipelinePerformer

    config = read_config(model_dir, options.model.trust_remote_code)
    source = make_source(model_dir, config, options.model, options.execution, device)
    # Only whether weights are quantized depends on whose layers compute the task.
    replace(source, precision=None).reject_own_options(f"transformers' code computes {task.name}")
    budget = options.strategy.max_rolling_batch_prefill_tokens
    step_tokens = budget or DEFAULT_STEP_TOKENS[device.type]
    if task.kind == "embedding":
        return Embedder(source, options, step_tokens)
    return PipelinePerformer(task.name, source, options, step_tokens)


def _load_handler(task: Task, model_dir: Path, device: torch.device) -> Performer:
    """Load the user's model.py with its properties and those that LMI adds, under LMI's names."""
    device_id = {"device_id": "0" if device.type == "cuda" else "-1"}
    added: Mapping[str, str] = {"model_dir": str(model_dir), **device_id}
    os.chdir(Path(task.name).parent)  # as in LMI: relative paths start at the handler's directory
    return load_handler(Path(task.name), {**task.properties, **added})
