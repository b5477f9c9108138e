"""Samples the tokens of all rows at once, each with its own parameters, without waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from core.sampling import Sampled, SequenceFailure
from core.sequence import Sequence as TokenSequence
from engine.sampling.kernels import SamplingKernels, make_sampling_kernels
from engine.sampling.ranking import RankedRows
from engine.sampling.rows import Change, Planning, Row, Settle, Stage, Use
from engine.staging import HostCopy, Staging, Upload

States = Mapping[Stage[Any], Any]
"""The state of each stage that a sequence uses."""


class Choices:
    """The sampled token of each row, with its log-probability under the unfiltered model."""

    def __init__(
        self, token_ids: Tensor, logprobs: Tensor, settlers: Sequence[Settle] = ()
    ) -> None:
        """Start a copy to the host. Does not wait.

        token_ids: [N] int64; logprobs: [N] fp32, nats; settlers: called in this order.
        """
        self.token_ids = token_ids
        self.logprobs = logprobs
        self._settlers = settlers
        self._copy = HostCopy([token_ids, logprobs])

    def wait(self) -> list[Sampled | SequenceFailure]:
        """Block until the copy is done. Call once, since stages may count what was sampled."""
        token_ids, logprobs = (tensor.tolist() for tensor in self._copy.wait())
        sampled: list[Sampled | SequenceFailure] = [
            Sampled((token_id,), (logprob,))
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        ]
        for settle in self._settlers:
            settle(sampled)
        return sampled


class Sampler:
    """Samples on the logits' device. `engine.sampling` lists the steps."""

    def __init__(
        self,
        staging: Staging,
        stages: Sequence[Stage[Any]],
        *,
        kernels: SamplingKernels | None = None,
    ) -> None:
        """stages: the logits processors, in the order in which they apply.

        kernels: by default the fastest for the device.
        """
        self._staging = staging
        self._stages = stages
        self._kernels = kernels or make_sampling_kernels(staging.device)
        self._states: WeakKeyDictionary[TokenSequence, States | None] = WeakKeyDictionary()
        """None for a plain sequence, which gets its most likely tokens and nothing else."""

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[Row], newest: Callable[[], Tensor]) -> Choices:
        """Sample a token per row.

        logits: [N, vocabulary], not modified; newest: returns [N] int64, each row's last token.
        """
        states = [self._states_of(row.sequence) for row in rows]
        if any(state is not None for state in states):
            return self._sample(logits, rows, states, newest)
        token_ids, normalizers = self._kernels.best_tokens(logits)
        return Choices(token_ids, _picked(logits, token_ids) - normalizers)

    def _sample(
        self,
        logits: Tensor,
        rows: Sequence[Row],
        states: Sequence[States | None],
        newest: Callable[[], Tensor],
    ) -> Choices:
        """Sample where not all rows are plain."""
        vocab_size = logits.shape[1]
        upload = Upload(self._staging)
        planning = Planning(vocab_size, upload)
        changes = self._plan_changes(rows, states, planning)
        draws = self._kernels.plan_draws(rows, vocab_size, upload)
        has_logprobs = any(row.params.logprobs is not None for row in rows)
        ranked = RankedRows(rows, upload) if has_logprobs else None
        upload.send()
        if changes or ranked is not None:
            logits = logits.float()
        scores = logits
        token_ids, normalizers = self._kernels.best_tokens(logits)
        if changes:
            scores, last_tokens = logits.clone(), newest()
            for change in changes:
                change(scores, last_tokens)
            token_ids = scores.argmax(-1)
        for draw in draws:
            draw(scores, token_ids)
        if ranked is not None:
            planning.settlers.insert(0, ranked.start(logits, token_ids, normalizers))
        return Choices(token_ids, _picked(logits, token_ids) - normalizers, planning.settlers)

    def _plan_changes(
        self, rows: Sequence[Row], states: Sequence[States | None], planning: Planning
    ) -> list[Change]:
        changes: list[Change] = []
        for stage in self._stages:
            uses = [
                Use(index, rows[index], state[stage])
                for index, state in enumerate(states)
                if state is not None and stage in state
            ]
            change = stage.plan(uses, planning) if uses else None
            if change is not None:
                changes.append(change)
        return changes

    def _states_of(self, sequence: TokenSequence) -> States | None:
        try:
            return self._states[sequence]
        except KeyError:
            return self._begin(sequence)

    def _begin(self, sequence: TokenSequence) -> States | None:
        changed = set(sequence.params.changed)
        used = (stage for stage in self._stages if not changed.isdisjoint(stage.fields))
        begun = ((stage, stage.begin(sequence)) for stage in used)
        states = {stage: state for stage, state in begun if state is not None}
        is_plain = sequence.params.is_greedy and sequence.params.logprobs is None
        self._states[sequence] = None if is_plain and not states else states
        return self._states[sequence]


def _picked(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the logits of the tokens [N], fp32."""
    return logits.gather(-1, token_ids[:, None])[:, 0].float()
