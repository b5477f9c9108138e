"""Penalties, logit bias, bad words and min_tokens, with and without a token in flight."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from core.sampling import Sampled, SamplingParams
from core.sequence import Sequence
from engine.sampling.allowed import Allowed
from engine.sampling.edits import Edits
from engine.sampling.penalties import Penalties
from engine.sampling.rows import Planning, Row
from engine.sampling.sampler import Sampler
from engine.staging import Staging, Upload
from tests.engine.sampling.stages import STAGES

VOCABULARY = 40
EOS = 0


def staging():
    return Staging(torch.device("cpu"))


def sequence_of(prompt, answer=(), **params):
    sequence = Sequence(0, prompt, SamplingParams(max_tokens=99, **params), eos_token_ids=[EOS])
    sequence.append(Sampled(tuple(answer), (0.0,) * len(answer)))
    assert sequence.token_ids == [*prompt, *answer]
    return sequence


def changed(stages, logits, sequences, *, in_flight=False):
    """Apply the stages to logits [N, vocabulary]; in_flight: the newest token is not known.

    stages: a list of them, or a sampler that has them.
    """
    sampler = stages if isinstance(stages, Sampler) else Sampler(staging(), stages)
    newest = torch.tensor([sequence.token_ids[-1] for sequence in sequences])
    rows = [Row(sequence, len(sequence.token_ids)) for sequence in sequences]
    taken = [(sequence, sequence.token_ids.pop()) for sequence in sequences] if in_flight else []
    upload = Upload(staging())
    states = [sampler._states_of(sequence) for sequence in sequences]
    changes = sampler._plan_changes(rows, states, Planning(VOCABULARY, upload))
    upload.send()
    scores = logits.clone()
    for change in changes:
        change(scores, newest)
    for sequence, token in taken:
        sequence.token_ids.append(token)
    return scores


def defined(logits, prompt, answer, params):
    """Compute penalties one logit at a time, as vLLM and OpenAI define them."""
    scores = logits.clone()
    for token in range(VOCABULARY):
        score, times = scores[token], answer.count(token)
        if token in prompt or times:
            score = (
                score / params.repetition_penalty
                if score > 0
                else score * params.repetition_penalty
            )
        scores[token] = (
            score - params.frequency_penalty * times - params.presence_penalty * (times > 0)
        )
    return scores


def random_sequences(count, **params):
    rng = random.Random(4)
    return [
        sequence_of(
            [rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(1, 12))],
            [rng.randrange(1, VOCABULARY) for _ in range(place % 9 * 12)],
            **params,
        )
        for place in range(count)
    ]


def random_logits(count, seed=0):
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.3},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -2.0, "presence_penalty": 2.0},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": -0.9},
    ],
    ids=str,
)
def test_penalties_match_their_definition(params, in_flight):
    sequences = random_sequences(18, **params)
    logits = random_logits(18)
    got = changed([Penalties()], logits, sequences, in_flight=in_flight)
    for row, sequence, before in zip(got, sequences, logits, strict=True):
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        answer = sequence.token_ids[sequence.num_prompt_tokens :]
        torch.testing.assert_close(row, defined(before, prompt, answer, sequence.params))
    assert not torch.equal(got, logits)


def test_repetition_penalty_equals_transformers():
    sequences = random_sequences(9, repetition_penalty=1.7)
    logits = random_logits(9)
    got = changed([Penalties()], logits, sequences)
    for row, sequence, before in zip(got, sequences, logits, strict=True):
        ids = torch.tensor([sequence.token_ids])
        assert torch.equal(row, RepetitionPenaltyLogitsProcessor(1.7)(ids, before[None].clone())[0])


def test_incremental_counts_equal_fresh_counts():
    kept, rng = Sampler(staging(), [Penalties()]), random.Random(1)
    sequences = random_sequences(5, repetition_penalty=1.5, frequency_penalty=0.3)
    for step in range(80):
        running = [sequence for sequence in sequences if rng.random() < 0.7] or sequences
        logits = random_logits(len(running), seed=step)
        again = changed(kept, logits, running, in_flight=step % 3 > 0)
        assert torch.equal(again, changed([Penalties()], logits, running))
        for sequence in running:
            sequence.append(Sampled((rng.randrange(1, VOCABULARY),), (0.0,)))


def test_the_order_of_writes_does_not_matter(monkeypatch):
    """The newest token may be written twice, and a device writes in any order."""
    sequences = random_sequences(18, repetition_penalty=1.2, frequency_penalty=0.4)
    for sequence in sequences:
        sequence.append(Sampled((sequence.token_ids[0],), (0.0,)))
    logits = random_logits(18)
    expected = changed([Penalties()], logits, sequences)
    scatter = torch.Tensor.scatter_

    def backwards(self, dim, index, source):
        return scatter(self, dim, index.flip(0), source.flip(0))

    monkeypatch.setattr(torch.Tensor, "scatter_", backwards)
    assert torch.equal(changed([Penalties()], logits, sequences), expected)


def test_state_of_a_sequence_is_freed_with_it():
    sampler = Sampler(staging(), [Edits(with_prompt=True), Penalties()])
    sequence = sequence_of([1, 2], [3], repetition_penalty=2.0, logit_bias={1: 1.0})
    changed(sampler, random_logits(1), [sequence])
    assert len(sampler._states) == 1
    del sequence
    assert len(sampler._states) == 0


def banned(*sequences, in_flight=False):
    """Return the banned tokens of each row."""
    scores = changed(
        [Edits(with_prompt=True)],
        torch.zeros(len(sequences), VOCABULARY),
        sequences,
        in_flight=in_flight,
    )
    assert torch.equal(scores, torch.zeros_like(scores).masked_fill(scores.isneginf(), -torch.inf))
    return [set(row.isneginf().nonzero()[:, 0].tolist()) for row in scores]


def test_logit_bias_is_added():
    logits = random_logits(3)
    rows = [
        sequence_of([1], logit_bias={3: 2.5, 7: -1.0}),
        sequence_of([1]),
        sequence_of([1], logit_bias={3: -9.0}),
    ]
    expected = logits.clone()
    expected[0, 3] += 2.5
    expected[0, 7] -= 1.0
    expected[2, 3] -= 9.0
    assert torch.equal(changed([Edits(with_prompt=True)], logits, rows), expected)


@pytest.mark.parametrize("in_flight", [False, True])
def test_min_tokens_bans_tokens_that_end_the_answer(in_flight):
    settings = {"min_tokens": 3, "stop_token_ids": (7, 10**6)}
    rows = [sequence_of([1, 2], [4] * count, **settings) for count in range(1, 5)]
    assert banned(*rows, in_flight=in_flight) == [{EOS, 7}, {EOS, 7}, set(), set()]
    assert banned(sequence_of([1], **settings)) == [{EOS, 7}]
    ignoring = sequence_of([1], min_tokens=3, ignore_eos=True)
    assert banned(ignoring) == [{EOS}], "as in vLLM"


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize(
    ("words", "answer", "expected"),
    [
        ([(5,)], [9], {5}),
        ([(5, 6)], [5], {6}),
        ([(5, 6)], [6], set()),
        ([(5, 6, 7)], [5, 6], {7}),
        ([(5, 6, 7)], [6, 5, 6], {7}),
        ([(5, 6, 7)], [5, 9, 6], set()),
        ([(5, 6, 7)], [6], set()),
        ([(5, 6, 7, 8)], [5, 6, 7], {8}),
        ([(1, 6)], [2], set()),
        ([(6, 6)], [6], {6}),
        ([(5, 6), (4, 6), (5, 7), (9,)], [5], {6, 7, 9}),
        ([(4, 6), (5, 6), (9,), (9,)], [5], {6, 9}),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned(words, answer, expected, in_flight):
    assert banned(sequence_of([1], answer, bad_words=words), in_flight=in_flight) == [expected]


def test_bad_words_only_match_the_answer():
    """vLLM does the same; transformers' NoBadWordsLogitsProcessor also matches the prompt."""
    assert banned(sequence_of([5], bad_words=[(5, 6)])) == [set()]
    assert banned(sequence_of([5], [6], bad_words=[(5, 6, 7)])) == [set()]


def test_a_bias_does_not_lift_a_ban():
    sequence = sequence_of([1], logit_bias={5: 100.0}, bad_words=[(5,)])
    assert banned(sequence) == [{5}]


def test_biases_are_applied_before_penalties():
    """If a bias makes a logit negative, the repetition penalty multiplies the logit."""
    sequence = sequence_of([3], logit_bias={3: -2.0}, repetition_penalty=2.0)
    logits = torch.ones(1, VOCABULARY)
    newest = torch.tensor([3])
    seen = {}
    sampler = Sampler(staging(), STAGES)
    original = torch.Tensor.argmax

    def noted(self, *args):
        seen["scores"] = self.clone()
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "argmax", noted)
        sampler.sample(logits, [Row(sequence, 1)], lambda: newest)
    assert seen["scores"][0, 3] == -2.0
    assert torch.equal(logits, torch.ones(1, VOCABULARY)), "the caller's logits are unchanged"


def test_only_allowed_tokens_are_possible():
    """One row of the batch allows all tokens, and one has a logit bias as well."""
    logits = random_logits(3)
    free, few = sequence_of([1, 2]), sequence_of([3], allowed_token_ids=[5, 9, 9])
    biased = sequence_of([4], allowed_token_ids=[7, 8], logit_bias={8: 2.0, 9: 50.0})
    scores = changed([Allowed(), Edits(with_prompt=True)], logits, [free, few, biased])
    assert torch.equal(scores[0], logits[0])
    assert scores[1].isfinite().nonzero()[:, 0].tolist() == [5, 9]
    assert torch.equal(scores[1, [5, 9]], logits[1, [5, 9]])
    assert scores[2].isfinite().nonzero()[:, 0].tolist() == [7, 8]
    assert torch.equal(scores[2, [7, 8]], logits[2, [7, 8]] + torch.tensor([0.0, 2.0]))
