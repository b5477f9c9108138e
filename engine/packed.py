"""The packed executor: decoders, over transformers' own model code and our KV memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from core.plan import Chunk, StepPlan, StepResult
from engine.attention_backend import AttentionBackend
from engine.beam_candidates import BeamCandidates
from engine.block_mover import BlockMover
from engine.decode_graphs import DecodeGraphs
from engine.executor import FinishedStep, SubmittedStep
from engine.inputs import InputBuilder, StepInputs
from engine.kv_cache import KVCache
from engine.packed_model import PackedModel
from engine.paged_step import PagedStep
from engine.sampler import HostChoices, Row, Sampler
from engine.staging import Staging


class PackedExecutor:
    """Runs any mixture of prompts, chunks and decode steps as one row of tokens.

    Nothing here waits for the device: inputs go there and tokens come back in copies that the
    host does not wait for, and a token that the next step needs never leaves the device.
    """

    def __init__(
        self,
        model: PackedModel,
        cache: KVCache,
        backend: AttentionBackend,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        staging = Staging(model.device)
        self._model = model
        self._cache = cache
        self._backend = backend
        self._graphs = graphs
        self._inputs = InputBuilder(cache.block_size, staging)
        self._mover = BlockMover(cache, backend)
        self._sampler = Sampler(staging)
        self._beam_staging = Staging(model.device)
        self._newest = torch.empty(0, dtype=torch.int64, device=model.device)
        """[S]: what the step before has sampled."""
        self._newest_rows: dict[int, int] = {}
        """By sequence id: where in it."""

    @torch.inference_mode()
    def submit(self, plan: StepPlan, between_tokens: Callable[[], None]) -> SubmittedStep:
        self._mover.launch(plan.moves)
        if not plan.chunks:
            return FinishedStep({})
        graph = self._graphs.graph_for(plan) if self._graphs is not None else None
        inputs = self._inputs.build(
            plan,
            newest=self._newest,
            newest_rows=self._newest_rows,
            num_rows=graph.num_rows if graph is not None else 0,
        )
        logits = self._forward(inputs) if graph is None else graph.replay(inputs)
        if not inputs.sampled:
            return FinishedStep({})
        rows = [Row(chunk.sequence, chunk.end) for chunk in inputs.sampled]
        choices = self._sampler.sample(logits, rows, inputs.newest())
        self._newest = choices.token_ids
        self._newest_rows = {row.sequence.id: place for place, row in enumerate(rows)}
        candidates = BeamCandidates(logits, inputs.sampled, self._beam_staging)
        return _PackedStep(inputs.sampled, choices.to_host(), candidates)

    def _forward(self, inputs: StepInputs) -> Tensor:
        return self._model.forward(inputs, PagedStep(inputs.batch, self._cache, self._backend))


@dataclass(frozen=True, slots=True)
class _PackedStep:
    sampled: tuple[Chunk, ...]
    choices: HostChoices
    candidates: BeamCandidates

    def wait(self) -> StepResult:
        pairs = zip(self.sampled, self.choices.wait(), strict=True)
        sampled = {chunk.sequence.id: sampled for chunk, sampled in pairs}
        return sampled | self.candidates.wait()
