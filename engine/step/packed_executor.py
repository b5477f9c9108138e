"""The packed executor: runs a decoder over the paged KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.beams import Candidates, Hypotheses
from core.foreign_code import contained
from core.images import images_in
from core.plan import Chunk, StepPlan, StepResult
from core.sampling import Sampled, SequenceFailure, TopLogprobs
from engine.attention.backends import AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.executor import FinishedStep, SubmittedStep
from engine.loading.packed_model import PackedModel
from engine.sampling.grammars import Grammars
from engine.sampling.rows import Row
from engine.sampling.sampler import HostChoices, Sampler
from engine.staging import Staging
from engine.step.beam_candidates import BeamCandidates
from engine.step.block_mover import BlockMover
from engine.step.leader import Leader
from engine.step.prompt_scores import MAX_SCORED_ROWS, PromptScores, join_scores, split_plan
from engine.step.step_graphs import StepGraphs
from engine.step_inputs import InputBuilder
from engine.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

NOTHING_SAMPLED = Sampled((), ())


class PackedExecutor:
    """Runs any mix of prefills, chunked prefills and decodes as one row of tokens.

    Only CUDA graphs need padding.

    `submit` never waits for the device, except for the encoder of new images. Inputs and sampled
    tokens are copied asynchronously, and the next step reads the tokens that it needs from the
    device's memory.
    """

    def __init__(
        self,
        model: PackedModel,
        cache: KVCache,
        backend: AttentionBackend,
        graphs: StepGraphs | None = None,
        grammars: Grammars | None = None,
        leader: Leader | None = None,
    ) -> None:
        """leader: tells the other ranks what this rank does; None if there are no others."""
        staging = Staging(model.device)
        self.model = model
        self.cache = cache
        self.backend = backend
        self.graphs = graphs
        """Steps as CUDA graphs; None if every step launches its kernels one by one."""
        self.leader = leader
        self._inputs = InputBuilder(cache.block_size, staging)
        self._mover = BlockMover(cache, backend)
        self._sampler = Sampler(staging, grammars)
        self._beam_staging = Staging(model.device)
        self._newest = torch.empty(0, dtype=torch.int64, device=model.device)
        """[S] int64: the tokens sampled by the previous step."""
        self._newest_rows: dict[int, int] = {}
        """Indices into `_newest`, by sequence id."""
        self.model_time = Stopwatch()
        """Runs while images are encoded, during forward passes on a CPU, and while the host waits
        for any other device."""
        is_cpu = model.device.type == "cpu"
        self._during_forward = self.model_time if is_cpu else nullcontext()
        self._during_wait = nullcontext() if is_cpu else self.model_time

    @torch.inference_mode()
    def submit(self, plan: StepPlan, between_tokens: Callable[[], None]) -> SubmittedStep:
        """Start a step: one forward pass, or several if `prompt_logprobs` need many rows."""
        if self.leader is not None:
            self.leader.move(plan.moves)
        self._mover.launch(plan.moves)
        if not plan.chunks:
            return FinishedStep({})
        with self.model_time:
            embeddings, failures = self._encode(plan)
        parts = [self._run_forward(part, embeddings) for part in split_plan(plan, MAX_SCORED_ROWS)]
        chunks = [chunk for part in parts for chunk in part.sampled_chunks]
        self._newest = torch.cat([part.token_ids for part in parts])
        self._newest_rows = {chunk.sequence.id: row for row, chunk in enumerate(chunks)}
        return _PackedStep(parts, failures, self._during_wait)

    def _encode(self, plan: StepPlan) -> tuple[dict[bytes, Tensor], dict[int, SequenceFailure]]:
        """Return the embeddings of the plan's images by digest, and the failures by sequence id.

        A sequence whose image fails still takes part in the step, and ends after it.
        """
        embeddings: dict[bytes, Tensor] = {}
        failures: dict[int, SequenceFailure] = {}
        encoder = self.model.encoder
        if encoder is None:
            return embeddings, failures
        for chunk in plan.chunks:
            try:
                with contained:
                    for image in images_in(chunk.sequence.parts, chunk.start, chunk.end):
                        embeddings[image.digest] = encoder(image, chunk.sequence.prefix_salt)
            except Exception as error:  # transformers' code may raise anything
                logger.exception("image encoder failed request=%d", chunk.sequence.id)
                failures[chunk.sequence.id] = SequenceFailure(f"the image encoder failed: {error}")
        return embeddings, failures

    def _run_forward(self, plan: StepPlan, embeddings: Mapping[bytes, Tensor]) -> _Part:
        """Run one forward pass, as a CUDA graph if there is one for it, and sample."""
        graph = self.graphs.graph_for(plan) if self.graphs is not None else None
        size = graph.size if graph is not None else None
        inputs = self._inputs.build(
            plan,
            newest=self._newest,
            newest_rows=self._newest_rows,
            size=size,
            embeddings=embeddings,
        )
        with self.leader.forward(inputs, size) if self.leader is not None else nullcontext():
            if graph is None:
                step = PagedStep(inputs.batch, self.cache, self.backend)
                with self._during_forward:
                    logits = self.model.forward(inputs, step)
            else:
                logits = graph.replay(inputs)
        num_sampled = len(inputs.sampled_chunks)
        scores = (
            PromptScores(logits[num_sampled:], inputs.scored_rows) if inputs.scored_rows else None
        )
        if not num_sampled:
            return _Part((), self._newest[:0], None, scores)
        rows = [Row(chunk.sequence, chunk.end) for chunk in inputs.sampled_chunks]
        choices = self._sampler.sample(logits[:num_sampled], rows, inputs.newest())
        candidates = BeamCandidates(logits[:num_sampled], inputs.sampled_chunks, self._beam_staging)
        return _Part(
            inputs.sampled_chunks, choices.token_ids, choices.to_host(), scores, candidates
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """The results of one forward pass of a step, on their way to the host."""

    sampled_chunks: tuple[Chunk, ...]
    """The S chunks for which a token was sampled."""
    token_ids: Tensor
    """[S] int64, on the device."""
    choices: HostChoices | None
    scores: PromptScores | None
    candidates: BeamCandidates | None = None


@dataclass(frozen=True, slots=True)
class _PackedStep:
    parts: list[_Part]
    failures: dict[int, SequenceFailure]
    during_wait: AbstractContextManager[None]

    def wait(self) -> StepResult:
        with self.during_wait:
            return self._results()

    def _results(self) -> StepResult:
        result: dict[int, Sampled | Candidates | Hypotheses | SequenceFailure] = {}
        scores: list[dict[int, tuple[TopLogprobs, ...]]] = []
        for part in self.parts:
            if part.choices is not None:
                ids = [chunk.sequence.id for chunk in part.sampled_chunks]
                result |= zip(ids, part.choices.wait(), strict=True)
            if part.candidates is not None:
                result |= part.candidates.wait()
            if part.scores is not None:
                scores.append(part.scores.wait())
        for id, prompt_logprobs in join_scores(scores).items():
            sampled = result.get(id, NOTHING_SAMPLED)
            if not isinstance(sampled, SequenceFailure):
                assert isinstance(sampled, Sampled), "a beam search scores no prompt"
                result[id] = replace(sampled, prompt_logprobs=prompt_logprobs)
        return result | self.failures
