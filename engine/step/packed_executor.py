"""The packed executor: decoders, over our KV memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.beams import Candidates, Hypotheses
from core.plan import Chunk, StepPlan, StepResult
from core.sampling import Failure, Sampled, TopLogprobs
from engine.attention.backends import AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.executor import FinishedStep, SubmittedStep
from engine.inputs import InputBuilder, StepInputs
from engine.loading.packed_model import PackedModel
from engine.sampling.grammars import Grammars
from engine.sampling.sampler import HostChoices, Row, Sampler
from engine.staging import Staging
from engine.step.beam_candidates import BeamCandidates
from engine.step.block_mover import BlockMover
from engine.step.decode_graphs import DecodeGraphs
from engine.step.prompt_scores import MAX_SCORED_ROWS, PromptScores, in_parts, joined

NOTHING_SAMPLED = Sampled((), ())


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
        grammars: Grammars | None = None,
    ) -> None:
        staging = Staging(model.device)
        self._model = model
        self._cache = cache
        self._backend = backend
        self._graphs = graphs
        self._inputs = InputBuilder(cache.block_size, staging)
        self._mover = BlockMover(cache, backend)
        self._sampler = Sampler(staging, grammars)
        self._beam_staging = Staging(model.device)
        self._newest = torch.empty(0, dtype=torch.int64, device=model.device)
        """[S]: what the step before has sampled."""
        self._newest_rows: dict[int, int] = {}
        """By sequence id: where in it."""

    @torch.inference_mode()
    def submit(self, plan: StepPlan, between_tokens: Callable[[], None]) -> SubmittedStep:
        """Several forwards only where many rows of prompts are scored."""
        self._mover.launch(plan.moves)
        if not plan.chunks:
            return FinishedStep({})
        parts = [self._submit(part) for part in in_parts(plan, MAX_SCORED_ROWS)]
        chunks = [chunk for part in parts for chunk in part.sampled]
        self._newest = torch.cat([part.token_ids for part in parts])
        self._newest_rows = {chunk.sequence.id: row for row, chunk in enumerate(chunks)}
        return _PackedStep(parts)

    def _submit(self, plan: StepPlan) -> _Part:
        graph = self._graphs.graph_for(plan) if self._graphs is not None else None
        inputs = self._inputs.build(
            plan,
            newest=self._newest,
            newest_rows=self._newest_rows,
            num_rows=graph.num_rows if graph is not None else 0,
        )
        logits = self._forward(inputs) if graph is None else graph.replay(inputs)
        num_sampled = len(inputs.sampled)
        scores = PromptScores(logits[num_sampled:], inputs.scored) if inputs.scored else None
        if not num_sampled:
            return _Part((), self._newest[:0], None, scores)
        rows = [Row(chunk.sequence, chunk.end) for chunk in inputs.sampled]
        choices = self._sampler.sample(logits[:num_sampled], rows, inputs.newest())
        candidates = BeamCandidates(logits[:num_sampled], inputs.sampled, self._beam_staging)
        return _Part(inputs.sampled, choices.token_ids, choices.to_host(), scores, candidates)

    def _forward(self, inputs: StepInputs) -> Tensor:
        step = PagedStep(inputs.batch, self._cache, self._backend)
        return self._model.forward(inputs, step)


@dataclass(frozen=True, slots=True)
class _Part:
    """One forward of a step, with what it sampled, [S] int64, and scored."""

    sampled: tuple[Chunk, ...]
    token_ids: Tensor
    choices: HostChoices | None
    scores: PromptScores | None
    candidates: BeamCandidates | None = None


@dataclass(frozen=True, slots=True)
class _PackedStep:
    parts: list[_Part]

    def wait(self) -> StepResult:
        result: dict[int, Sampled | Candidates | Hypotheses | Failure] = {}
        scores: list[dict[int, tuple[TopLogprobs, ...]]] = []
        for part in self.parts:
            if part.choices is not None:
                ids = [chunk.sequence.id for chunk in part.sampled]
                result |= zip(ids, part.choices.wait(), strict=True)
            if part.candidates is not None:
                result |= part.candidates.wait()
            if part.scores is not None:
                scores.append(part.scores.wait())
        for id, prompt in joined(scores).items():
            sampled = result.get(id, NOTHING_SAMPLED)
            if not isinstance(sampled, Failure):
                assert isinstance(sampled, Sampled), "a beam search scores no prompt"
                result[id] = replace(sampled, prompt=prompt)
        return result
