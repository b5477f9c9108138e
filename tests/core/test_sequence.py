"""Sequences finish once with the right reason; sampling parameters are validated."""

from __future__ import annotations

import msgspec
import pytest

from core.errors import RequestError
from core.images import Images, PromptImage
from core.output import Output
from core.protocol.messages import Step, Submit
from core.sampling import Finish, Sampled, SamplingParams, TopLogprobs
from core.sequence import Sequence
from engine.sampling.grammars import Constraint
from engine.sampling.ngrams import WithoutRepeats
from engine.scores.part import ScoredPrompt


def make_sequence(parts=(), **params):
    return Sequence(0, [5, 6, 7], SamplingParams(**params), eos_token_ids=[0, 1], parts=parts)


def append(sequence, *token_ids):
    return sequence.append(Sampled(token_ids, (0.0,) * len(token_ids)))


def test_a_new_sequence_has_a_pending_prompt():
    sequence = make_sequence()
    assert (sequence.num_pending_tokens, sequence.num_generated_tokens) == (3, 0)
    assert sequence.max_length == 19, "3 tokens and max_tokens, 16 by default"
    sequence.num_computed_tokens = 3
    append(sequence, 9)
    assert (sequence.num_pending_tokens, sequence.num_generated_tokens) == (1, 1)


@pytest.mark.parametrize(
    ("params", "tokens", "count", "finish"),
    [
        ({}, (9, 1, 8), 2, Finish.EOS),
        ({"ignore_eos": True}, (9, 1, 8), 3, None),
        ({"max_tokens": 2}, (9, 8, 7), 2, Finish.LENGTH),
        ({"max_tokens": 2}, (9, 0), 2, Finish.EOS),
        ({"stop_token_ids": (8,)}, (9, 8, 7), 2, Finish.STOP),
        ({"stop_token_ids": (8,), "ignore_eos": True}, (0, 8), 2, Finish.STOP),
    ],
)
def test_finish_reasons(params, tokens, count, finish):
    sequence = make_sequence(**params)
    assert append(sequence, *tokens) == count
    assert sequence.finish == finish
    assert sequence.token_ids[3:] == list(tokens[:count])


def test_a_completed_grammar_finishes_the_sequence():
    """The sequence ends with the token that completes the grammar, even if it is no EOS token."""
    for params in ({"ignore_eos": True}, {"max_tokens": 3}, {}):
        sequence = make_sequence(**params)
        assert sequence.append(Sampled((9, 9, 8), (0.0,) * 3, ends_answer=True)) == 3
        assert sequence.finish == Finish.EOS
    cut = make_sequence(max_tokens=2)
    cut.append(Sampled((9, 9, 8), (0.0,) * 3, ends_answer=True))
    assert cut.finish == Finish.LENGTH


def test_tokens_that_the_host_must_know_are_waited_for():
    """The next token is scheduled early only if the host does not need the token in flight."""
    for parts, pending in (((), 1), ((Constraint("", None),), 0), ((WithoutRepeats(),), 0)):
        sequence = make_sequence(parts)
        assert sequence.num_pending_tokens == 3
        sequence.num_computed_tokens, sequence.num_in_flight = 3, 1
        assert sequence.num_pending_tokens == pending
        append(sequence, 9)
        assert sequence.num_pending_tokens == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("no_repeat_ngram_size", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("stop", ("",)),
        ("stop", ""),
        ("min_p", -0.1),
        ("min_p", float("nan")),
        ("typical_p", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {1: float("-inf")}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: 2e6}),
        ("seed", 2**70),
        ("temperature", 1e31),
        ("bad_words", ("a", "")),
        ("bad_words", ((),)),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
    ],
)
def test_out_of_range_values_are_named(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", "hot", "Expected `float`, got `str`"),
        ("top_k", 1.5, "Expected `int`, got `float`"),
        ("top_k", True, "Expected `int`, got `bool`"),
        ("ignore_eos", 1, "Expected `bool`, got `int`"),
        ("stop", [1], "Expected `str`, got `int`"),
        ("stop_token_ids", ["x"], "Expected `int`, got `str`"),
        ("logit_bias", {1: "x"}, "Expected `float`, got `str`"),
        ("temprature", 1.0, "no such parameter; did you mean 'temperature'?"),
        ("max_new_tokens", 1, "no such parameter; did you mean 'max_tokens'?"),
        ("zzz", 1, "no such parameter"),
    ],
)
def test_unknown_names_and_wrong_types_are_named(field, value, message):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value) == f"{field}: {message}"


def test_none_means_the_default():
    names = [field.name for field in msgspec.structs.fields(SamplingParams)]
    optional = {name: None for name in names if name != "max_tokens"}
    assert SamplingParams(**optional) == SamplingParams()
    assert SamplingParams(max_tokens=None).max_tokens > 10**9


def test_vllm_style_parameters():
    params = SamplingParams(
        temperature=0.8, top_p=0.95, top_k=-1, stop=["\n"], stop_token_ids=[2],
        logit_bias={7: 1}, bad_words=["no"], logprobs=5, max_tokens=32,
    )  # fmt: skip
    assert params.stop_strings == ("\n",)
    assert params.stop_token_ids == (2,)
    assert params.bad_words == ("no",)
    assert isinstance(params.logit_bias[7], float)


def test_all_parameters_round_trip_through_msgpack():
    params = SamplingParams(
        logit_bias={3: 1.5}, bad_words=("a", (1, 2)), stop="x", logprobs=0, prompt_logprobs=2
    )
    submit = Submit("id", [1], params)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=Submit) == submit
    top = TopLogprobs(-0.5, 2, (4, 5), (-0.1, float("-inf")))
    logprobs = {"top_logprobs": (top,), "prompt_logprobs": (top, top)}
    step = Step([("id", Output(0, (4,), (-0.5,), Finish.EOS, **logprobs))])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Step) == step


def test_each_prompt_position_is_scored_once():
    sequence = make_sequence(parts=(ScoredPrompt(3),))
    assert sequence.extra_rows(0, 2) == range(0, 2)
    sequence.seek(1)
    assert sequence.extra_rows(0, 3) == range(1, 2), "the last known token has no successor"
    assert not sequence.extra_rows(2, 9)
    assert sequence.num_skippable_tokens == 1
    assert not sequence.fork(1).extra_rows(0, 3), "only the first sequence scores the prompt"
    assert not make_sequence().extra_rows(0, 3)


@pytest.mark.parametrize(("keep", "left"), [(None, 9), (4, 4), (20, 9), (-1, 8)])
def test_truncation(keep, left):
    params = SamplingParams(truncate_prompt_tokens=keep, max_tokens=4)
    ids = list(range(9))
    assert params.truncated(ids, max_model_len=12) == ids[-left:]
    assert params.truncated(ids[-left:], max_model_len=12) == ids[-left:]


def test_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams().is_greedy


@pytest.mark.parametrize(
    ("params", "field"),
    [({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": 3, "best_of": 2}, "best_of"),
     ({"best_of": 129}, "best_of")],
)  # fmt: skip
def test_out_of_range_numbers_of_answers_are_named(params, field):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("end", "cut"), [(2, 2), (3, 2), (5, 2), (6, 6), (7, 6), (9, 6), (10, 10), (11, 11)]
)
def test_chunks_do_not_end_inside_bidirectional_images(end, cut):
    images = tuple(PromptImage(start, 4, b"digest", {}, is_bidirectional=True) for start in (2, 6))
    assert Sequence(0, range(12), SamplingParams(), parts=(Images(images),)).chunk_end(end) == cut
    causal = tuple(PromptImage(start, 4, b"digest", {}) for start in (2, 6))
    assert Sequence(0, range(12), SamplingParams(), parts=(Images(causal),)).chunk_end(end) == end
