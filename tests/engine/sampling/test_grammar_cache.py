"""Which grammars are compiled, when, how often, and how many are kept."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from core.configuration.limits import GRAMMARS_IN_USE
from core.errors import GenerationError, OverloadedError, RequestError
from core.text.grammar_matcher import compile_grammar
from engine import (
    LLM,
    SamplingParams,
    StructuredOutputsParams,
)
from engine.sampling.grammars import MAX_KEPT, Grammars
from tests.engine.sampling.grammar_models import (
    EOS,
    PROMPTS,
    SMALL,
    answer,
    answers,
    form,
)


@pytest.fixture
def compiled(monkeypatch):
    """The grammars that were compiled, in order. One that was compiled twice is listed twice."""
    texts = []

    def count(tokenizer, text):
        texts.append(text)
        return compile_grammar(tokenizer, text)

    monkeypatch.setattr("engine.sampling.grammars.compile_grammar", count)
    return texts


def test_threads_compile_a_grammar_once(grammar_model, compiled):
    grammars = Grammars(grammar_model, [EOS])
    many = StructuredOutputsParams(choice=tuple(f"{n:x}" for n in range(1500)))
    with ThreadPoolExecutor(8) as threads:
        matchers = [*threads.map(grammars.matcher, [many] * 8)]
    assert len(compiled) == 1
    assert all(matcher.consume_token(64) for matcher in matchers), "each starts at the beginning"


def test_a_wrong_grammar_fails_every_time(grammar_model, compiled):
    grammars = Grammars(grammar_model, [EOS])
    wrong = StructuredOutputsParams(grammar="start: nowhere")
    for _ in range(2):
        with pytest.raises(RequestError, match="nowhere"):
            grammars.matcher(wrong)
        assert not grammars.is_compiled(wrong)
    assert len(compiled) == 2


def test_no_step_compiles_a_grammar(grammar_model, compiled):
    """The number of requests is larger than the number of compiled grammars that are kept."""
    with LLM(grammar_model, batching="none", **SMALL) as llm:
        params = [SamplingParams(max_tokens=2, **form(regex=f"a{{{n}}}"))
                  for n in range(2, MAX_KEPT + 8)]  # fmt: skip
        assert {answer.text for answer in answers(llm, params)} == {"aa"}
    assert len(compiled) == len(params)


def test_large_grammars_of_many_requests_are_refused(grammar_model, monkeypatch):
    limit = dataclasses.replace(GRAMMARS_IN_USE, maximum=25)
    monkeypatch.setattr("engine.sampling.grammars.GRAMMARS_IN_USE", limit)
    with LLM(grammar_model, **SMALL) as llm:
        assert answer(llm, n=3, max_tokens=2, **form(regex="a{20}")).text == "aa"
        with pytest.raises(OverloadedError, match="25 characters"):
            answers(llm, [SamplingParams(**form(regex=regex)) for regex in ("a{20}", "b{20}")])
        assert answer(llm, max_tokens=2, **form(regex="b{20}")).text == "bb"


AMBIGUOUS = form(grammar='start: s\ns: s s | "a"')


@pytest.fixture
def slow_masks(monkeypatch):
    """Let every mask count as if it had taken 0.15 s longer than it may."""
    monkeypatch.setattr("engine.sampling.grammars.SECONDS_PER_MASK", -0.15)


@pytest.mark.usefixtures("slow_masks")
def test_an_ambiguous_grammar_fails_only_its_request(grammar_model):
    with LLM(grammar_model, **SMALL) as llm:
        ambiguous = SamplingParams(seed=1, max_tokens=3, ignore_eos=True, **AMBIGUOUS)
        streams = [
            llm.stream(PROMPTS[0], ambiguous),
            llm.stream(PROMPTS[1], SamplingParams(seed=1)),
        ]
        with pytest.raises(GenerationError, match="too ambiguous"):
            list(streams[0])
        assert "".join(delta.text for delta in streams[1])


@pytest.mark.usefixtures("slow_masks")
@pytest.mark.parametrize(
    ("max_tokens", "grammar"),
    [(1, AMBIGUOUS), (8, form(regex="aa"))],  # "aa" is complete with its second mask
)
def test_slow_masks_harm_no_answer_that_ends_in_time(grammar_model, max_tokens, grammar):
    with LLM(grammar_model, **SMALL) as llm:
        assert set(answer(llm, max_tokens=max_tokens, **grammar).text) == {"a"}


def test_compiled_grammars_are_cached_up_to_a_limit(grammar_model):
    grammars = Grammars(grammar_model, [EOS])
    forms = [StructuredOutputsParams(regex=f"a{{{n}}}") for n in range(MAX_KEPT + 2)]
    for kept_form in forms:
        assert not grammars.is_compiled(kept_form)
        grammars.matcher(kept_form).consume_token(64)
    assert [grammars.is_compiled(kept_form) for kept_form in forms] == [
        False,
        False,
        *[True] * MAX_KEPT,
    ]
    first = grammars.matcher(forms[2])
    assert first.consume_token(64)
    assert not first.is_stopped(), "a copy starts at the beginning"
    assert first.consume_token(64)
    assert first.is_stopped()
    grammars.matcher(forms[0])
    assert grammars.is_compiled(forms[2]), "forms[2] was used later than forms[3]"
    assert not grammars.is_compiled(forms[3])
