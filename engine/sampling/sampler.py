"""Samples the tokens of all rows at once, each with its own parameters, without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.sampling import Failure, Sampled
from engine.sampling.allowed import Allowed
from engine.sampling.edits import Edits
from engine.sampling.grammar import Grammar, GrammarMask
from engine.sampling.grammars import Grammars
from engine.sampling.kernels import SamplingKernels, make_sampling_kernels
from engine.sampling.ngrams import Ngrams
from engine.sampling.penalties import Penalties
from engine.sampling.ranking import Ranking, plan_ranking
from engine.sampling.rows import Row
from engine.staging import HostCopy, Staging, Upload


@dataclass(frozen=True, slots=True)
class Choices:
    """The sampled token of each row, with its log-probability under the unfiltered model."""

    token_ids: Tensor
    """[N] int64."""
    logprobs: Tensor
    """[N] fp32, nats."""
    ranking: Ranking | None
    """The most likely tokens of the rows with `logprobs`, in row order."""
    widths: tuple[int | None, ...]
    """The `logprobs` of each row."""
    mask: GrammarMask | None = None
    """The token mask of the rows with `structured_outputs`."""

    def to_host(self) -> HostChoices:
        """Start a copy to the host. Does not wait."""
        return HostChoices(self)


class HostChoices:
    """Sampled tokens on their way to the host."""

    def __init__(self, choices: Choices) -> None:
        self._copy = HostCopy([choices.token_ids, choices.logprobs])
        self._ranking = choices.ranking.to_host() if choices.ranking is not None else None
        self._widths = choices.widths
        self._mask = choices.mask

    def wait(self) -> list[Sampled | Failure]:
        """Block until the copy is done. Call once, since it advances the grammars' matchers."""
        token_ids, logprobs = (tensor.tolist() for tensor in self._copy.wait())
        top = [()] * len(token_ids)
        if self._ranking is not None:
            ranked = self._ranking.wait([width for width in self._widths if width is not None])
            top = [() if width is None else (next(ranked),) for width in self._widths]
        sampled: list[Sampled | Failure] = [
            Sampled((token_id,), (logprob,), best)
            for token_id, logprob, best in zip(token_ids, logprobs, top, strict=True)
        ]
        if self._mask is not None:
            self._mask.settle(sampled)
        return sampled


class Sampler:
    """Samples on the logits' device. `engine.sampling` lists the steps."""

    def __init__(
        self,
        staging: Staging,
        grammars: Grammars | None = None,
        *,
        with_prompt: bool = True,
        kernels: SamplingKernels | None = None,
    ) -> None:
        """with_prompt: `no_repeat_ngram_size` also covers the prompt. False if an encoder reads it.

        kernels: by default the fastest for the device.
        """
        self._staging = staging
        self._allowed = Allowed()
        self._edits = Edits(Ngrams(with_prompt=with_prompt))
        self._penalties = Penalties()
        self._grammar = Grammar(grammars)
        self._kernels = kernels or make_sampling_kernels(staging.device)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[Row], newest: Tensor) -> Choices:
        """Sample a token per row.

        logits: [N, vocabulary], not modified; newest: [N] int64, each row's last token.
        """
        vocab_size = logits.shape[1]
        upload = Upload(self._staging)
        mask = self._grammar.plan(rows, vocab_size, upload)
        changes = [
            self._allowed.plan(rows, vocab_size, upload),
            self._edits.plan(rows, vocab_size, upload),
            self._penalties.plan(rows, vocab_size, upload),
            mask,
        ]
        draws = self._kernels.plan_draws(rows, vocab_size, upload)
        rank = plan_ranking(rows, upload)
        upload.send()
        if any(changes) or rank is not None:
            logits = logits.float()
        scores = logits
        token_ids, normalizers = self._kernels.best_tokens(logits)
        if any(changes):
            scores = logits.clone()
            for change in changes:
                if change is not None:
                    change(scores, newest)
            token_ids = scores.argmax(-1)
        for draw in draws:
            draw(scores, token_ids)
        picked = logits.gather(-1, token_ids[:, None])[:, 0].float()
        return Choices(
            token_ids,
            picked - normalizers,
            rank(logits, token_ids, normalizers) if rank is not None else None,
            tuple(row.params.logprobs for row in rows),
            mask,
        )
