"""The packed executor: decoders, over transformers' own model code and our KV memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from core.plan import StepPlan, StepResult
from engine.attention_backend import AttentionBackend
from engine.inputs import make_inputs
from engine.kv_cache import KVCache
from engine.packed_model import PackedModel
from engine.paged_step import PagedStep
from engine.sampler import sample


class PackedExecutor:
    """Runs any mixture of prompts, chunks and decode steps as one row of tokens."""

    def __init__(self, model: PackedModel, cache: KVCache, backend: AttentionBackend) -> None:
        self._model = model
        self._cache = cache
        self._backend = backend

    @torch.inference_mode()
    def run(self, plan: StepPlan, between_tokens: Callable[[], None]) -> StepResult:
        inputs = make_inputs(plan, self._cache.block_size, self._model.device)
        step = PagedStep(inputs.batch, self._cache, self._backend)
        logits = self._model.forward(inputs, step)
        sequences = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        if not sequences:
            return {}
        sampled = sample(logits, sequences).to_host()
        return {each.id: one for each, one in zip(sequences, sampled, strict=True)}
