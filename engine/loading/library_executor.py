"""The library executor: generates whole answers with transformers' `generate` on padded batches.

It serves every model that cannot run packed. With `dynamic` batching of a decoder, it is the padded
request-level batching that serving systems used before continuous batching.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from core.beams import Hypotheses, Hypothesis
from core.plan import StepPlan
from core.sampling import ChunkResult, Finish, Sampled, SequenceFailure, TopLogprobs
from core.sequence import Sequence
from engine.executor import FinishedStep
from engine.loading.model_source import ModelSource
from engine.sampling.rows import Row
from engine.sampling.sampler import Sampler
from engine.scores.library import NOT_FOR_ENCODER_DECODERS, score_prompts
from engine.stopwatch import Stopwatch


class LibraryModel:
    """A transformers model with `generate`. Created by `load_library_model`."""

    description, quantization = "", ""
    num_weights = 0
    encoder = None

    def __init__(self, model: Any) -> None:
        self.model = model
        is_encoder_decoder = model.config.is_encoder_decoder
        self.unavailable = NOT_FOR_ENCODER_DECODERS if is_encoder_decoder else {}

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def weights_bytes(self) -> int:
        return self.model.get_memory_footprint()


def load_library_model(source: ModelSource) -> LibraryModel:
    """Load the model onto the source's device. Raises whatever transformers raises."""
    is_encoder_decoder = source.config.is_encoder_decoder
    model = source.load(AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM)
    model.generation_config = _without_defaults(model.generation_config)
    return LibraryModel(model.to(source.device).eval())


def _without_defaults(model_config: Any) -> Any:
    """Return a generation config without sampling or stopping settings; requests set these.

    NOTE: `generate` merges the model's own config into any config that it is passed.
    """
    config = type(model_config)()
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id", "forced_bos_token_id"):
        setattr(config, name, getattr(model_config, name, None))
    return config


class LibraryExecutor:
    """Runs a plan of whole prompts until every answer has ended.

    Each row keeps its own sampling parameters: our sampler picks the tokens in transformers' loop.
    """

    def __init__(self, model: LibraryModel, sampler: Sampler) -> None:
        self.model = model.model
        self._sampler = sampler
        self.model_time = Stopwatch()
        """Runs for the whole step: transformers' loop samples between the forward passes."""

    @torch.inference_mode()
    def submit(self, plan: StepPlan, between_tokens: Callable[[], None]) -> FinishedStep:
        with self.model_time:
            return self._run(plan, between_tokens)

    def _run(self, plan: StepPlan, between_tokens: Callable[[], None]) -> FinishedStep:
        assert all(chunk.start == 0 and chunk.samples_token for chunk in plan.chunks), (
            "`generate` runs only whole prompts"
        )
        result: dict[int, ChunkResult] = {}
        answers = [
            _Row(chunk.sequence) for chunk in plan.chunks if not chunk.sequence.params.beam_width
        ]
        if answers:
            self._sample(answers, between_tokens)
            result |= {row.sequence.id: row.failure or row.sampled() for row in answers}
        for chunk in plan.chunks:
            if chunk.sequence.params.beam_width:
                result[chunk.sequence.id] = self._search(chunk.sequence, between_tokens)
        score_prompts(self.model, plan.chunks, result)
        return FinishedStep(result)

    def _sample(self, answers: list[_Row], between_tokens: Callable[[], None]) -> None:
        input_ids, attention_mask = self._pad([row.sequence.token_ids for row in answers])
        self.model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=self._generation_config(answers),
            logits_processor=LogitsProcessorList([_ForceSampled(answers, self._sampler)]),
            stopping_criteria=StoppingCriteriaList([_StopEnded(answers, between_tokens)]),
        )

    def _search(self, sequence: Sequence, between_tokens: Callable[[], None]) -> Hypotheses:
        """Run transformers' beam search for one request."""
        input_ids, attention_mask = self._pad([sequence.token_ids])
        params = sequence.params
        config = copy(self.model.generation_config)
        config.max_new_tokens = params.max_tokens
        config.do_sample = False
        config.num_beams = params.beam_width
        config.num_return_sequences = params.n
        config.length_penalty = params.length_penalty
        config.early_stopping = params.early_stopping
        config.eos_token_id = list(sequence.stop_token_ids) or None
        config.pad_token_id = self._pad_token_id()
        config.return_dict_in_generate = config.output_scores = True
        output = self.model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([_StopSearch(sequence, between_tokens)]),
        )
        logprobs = self.model.compute_transition_scores(
            output.sequences, output.scores, output.beam_indices
        )
        generated = output.sequences[:, -logprobs.shape[1] :].tolist()
        rows = zip(generated, logprobs.tolist(), output.sequences_scores.tolist(), strict=True)
        return Hypotheses(tuple(_hypothesis(sequence, *row) for row in rows))

    def _generation_config(self, answers: list[_Row]) -> Any:
        config = copy(self.model.generation_config)
        config.max_new_tokens = max(row.sequence.params.max_tokens for row in answers)
        config.do_sample = False
        config.pad_token_id = self._pad_token_id()
        return config

    def _pad(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return ids and attention mask [N, longest], padded on the left for a decoder."""
        longest = max(map(len, prompts))
        ids, mask = [], []
        for prompt in prompts:
            padding = longest - len(prompt)
            fill, masked = [self._pad_token_id()] * padding, [0] * padding
            if self.model.config.is_encoder_decoder:
                ids.append(prompt + fill)
                mask.append([1] * len(prompt) + masked)
            else:
                ids.append(fill + prompt)
                mask.append(masked + [1] * len(prompt))
        device = self.model.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _pad_token_id(self) -> int:
        pad = self.model.generation_config.pad_token_id
        return 0 if pad is None else pad


def _hypothesis(
    sequence: Sequence, token_ids: list[int], logprobs: list[float], score: float
) -> Hypothesis:
    """Cut a beam's tokens where the answer ends; padding follows."""
    answer = sequence.fork(sequence.id)
    count = answer.append(Sampled(tuple(token_ids), tuple(logprobs)))
    finish = answer.finish or Finish.ABORT
    return Hypothesis(tuple(token_ids[:count]), tuple(logprobs[:count]), finish, score)


class _Row:
    """One answer while `generate` runs. Appends to a copy: the strategy owns the sequence."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.copy = sequence.fork(sequence.id)
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []
        self._ends_answer = False
        self.failure: SequenceFailure | None = None

    @property
    def has_ended(self) -> bool:
        return self.copy.finish is not None or self.sequence.finish is not None

    def append(self, sampled: Sampled | SequenceFailure) -> None:
        if isinstance(sampled, SequenceFailure):
            self.failure, self.copy.finish = sampled, Finish.ERROR
            return
        self.copy.append(sampled)
        self._ends_answer = sampled.ends_answer
        self._logprobs += sampled.logprobs
        self._top_logprobs += sampled.top_logprobs

    def sampled(self) -> Sampled:
        return Sampled(
            tuple(self.copy.token_ids[self.copy.num_prompt_tokens :]),
            tuple(self._logprobs),
            tuple(self._top_logprobs),
            ends_answer=self._ends_answer,
        )


class _ForceSampled(LogitsProcessor):
    """Samples each row's token and masks all others, so that `generate` must pick it."""

    def __init__(self, answers: list[_Row], sampler: Sampler) -> None:
        self._answers = answers
        self._sampler = sampler

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = [Row(answer.copy, len(answer.copy.token_ids)) for answer in self._answers]

        def newest() -> Tensor:
            ids = [answer.copy.token_ids[-1] for answer in self._answers]
            return torch.tensor(ids, device=scores.device)

        choices = self._sampler.sample(scores, rows, newest)
        for answer, sampled in zip(self._answers, choices.wait(), strict=True):
            if not answer.has_ended:
                answer.append(sampled)
        forced = torch.full_like(scores, float("-inf"))
        return forced.scatter(1, choices.token_ids[:, None], 0.0)


class _StopSearch(StoppingCriteria):
    """Stops a beam search whose request was aborted."""

    def __init__(self, sequence: Sequence, between_tokens: Callable[[], None]) -> None:
        self._sequence = sequence
        self._between_tokens = between_tokens

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self._between_tokens()
        is_aborted = self._sequence.finish is not None
        return torch.full((len(input_ids),), is_aborted, device=input_ids.device)


class _StopEnded(StoppingCriteria):
    """Stops each row where its answer ends or its request was aborted."""

    def __init__(self, answers: list[_Row], between_tokens: Callable[[], None]) -> None:
        self._answers = answers
        self._between_tokens = between_tokens

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self._between_tokens()
        ended = [answer.has_ended for answer in self._answers]
        return torch.tensor(ended, device=input_ids.device)
