"""Structured outputs with random weights follow the grammar in every strategy."""

from __future__ import annotations

import json
import re
import shutil
from string import ascii_letters

import jsonschema_rs
import llguidance
import pytest

from core.errors import GenerationError, RequestError
from engine import (
    LLM,
    GuidedDecodingParams,
    LoRARequest,
    SamplingParams,
)
from engine.sampling.grammars import Grammars
from tests.engine.greedy_answers import STRATEGIES
from tests.engine.lora.adapter_files import merged, write_adapter
from tests.engine.sampling.grammar_models import (
    EOS,
    PROMPTS,
    SMALL,
    answer,
    answers,
    form,
)
from tests.escaping import ESCAPING

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "newt"]}, "maxItems": 2},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "pets", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z]{2}$"}]}},
}
LONG = 160
"""Enough tokens for any answer of the schema."""


@pytest.fixture(scope="module")
def llm(grammar_model):
    with LLM(grammar_model, **SMALL) as llm:
        yield llm


def mixed():
    """Return requests that alternate between constrained and free answers."""
    return [
        SamplingParams(
            seed=number, max_tokens=LONG if number % 2 == 0 else 30, ignore_eos=number % 4 == 1,
            **(form(json=SCHEMA) if number % 2 == 0 else {}),
        )
        for number in range(6)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(grammar_model):
    """Return the answers of single requests without overlap."""
    with LLM(grammar_model, batching="none", async_scheduling=False, **SMALL) as llm:
        prompts = [PROMPTS[number % 3] for number in range(6)]
        return [
            llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, params in zip(prompts, mixed(), strict=True)
        ]


def test_answers_follow_the_schema(llm):
    validator = jsonschema_rs.validator_for(SCHEMA)
    params = [SamplingParams(seed=s, max_tokens=LONG, **form(json=SCHEMA)) for s in range(12)]
    reply = answers(llm, params)
    assert {output.finish_reason for output in reply} == {"stop"}
    assert len({output.text for output in reply}) == 12
    for output in reply:
        validator.validate(json.loads(output.text))


@pytest.mark.matrix
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("batching", [*STRATEGIES, "library"])
def test_a_mixed_batch_equals_single_requests(grammar_model, alone, batching, overlaps):
    """`paged` preempts sequences here, and still feeds earlier tokens to the grammar only once."""
    options = {"executor": "library"} if batching == "library" else {"batching": batching}
    options |= STRATEGIES.get(batching, {})
    if batching == "paged":
        options |= {"num_kv_blocks": 26, "preemption_mode": "auto" if overlaps else "recompute"}
    with LLM(grammar_model, async_scheduling=overlaps, **options, **SMALL) as llm:
        assert [output.token_ids for output in answers(llm, mixed())] == alone
        assert (llm.llm_engine.strategy.num_preemptions > 0) == (batching == "paged")
        assert llm.llm_engine.strategy.memory.num_held_blocks == 0


def test_adapters_follow_the_grammar_too(grammar_model, tmp_path):
    """Requests with an adapter and requests without one run in one batch.

    Greedy answers equal those of the merged model.
    """
    adapter = write_adapter(grammar_model, tmp_path / "adapter", seed=3)
    whole = merged(grammar_model, adapter, tmp_path / "merged")
    shutil.copy(grammar_model / "tokenizer.json", whole)
    params = SamplingParams(temperature=0, max_tokens=24, **form(regex="[a-f]{8}-[0-9x]{4,12}!"))
    with LLM(whole, **SMALL) as llm:
        expected = answers(llm, [params] * 3)
    with LLM(grammar_model, enable_lora=True, **SMALL) as llm:
        adapters = [LoRARequest("one", 1, str(adapter)), None, None]
        prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1]]
        reply = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    adapted, own, _ = (answer.outputs[0].text for answer in reply)
    assert adapted == expected[0].text != own
    assert all(re.fullmatch("[a-f]{8}-[0-9x]{4,12}!", text) for text in (adapted, own))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_samples(grammar_model, mode):
    params = SamplingParams(seed=3, n=2, max_tokens=LONG, **form(json=SCHEMA))
    texts = []
    for changes in ({"num_kv_blocks": 300}, {"num_kv_blocks": 45, "preemption_mode": mode}):
        with LLM(grammar_model, batching="paged", **changes, **SMALL) as llm:
            results = llm.generate(PROMPTS, params, use_tqdm=False)
            texts.append([output.text for result in results for output in result.outputs])
            preempted = llm.llm_engine.strategy.num_preemptions
    assert preempted > 0
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 6
    for text in texts[0]:
        jsonschema_rs.validate(SCHEMA, json.loads(text))


def test_free_answers_still_overlap(grammar_model):
    """Beside a constrained answer, the steps of a free answer are still submitted ahead."""
    with LLM(grammar_model, async_scheduling=True, **SMALL) as llm:
        ahead = []
        submit = llm.llm_engine.executor.submit

        def watch(plan, between_tokens):
            for chunk in plan.chunks:
                ahead.append((chunk.sequence.params.structured_outputs, chunk.ends_in_flight))
            return submit(plan, between_tokens)

        llm.llm_engine.executor.submit = watch
        params = [SamplingParams(seed=2, max_tokens=20, ignore_eos=True, **changes)
                  for changes in ({}, form(regex="[a-z]*"))]  # fmt: skip
        answers(llm, params)
    free = [in_flight for grammar, in_flight in ahead if grammar is None]
    assert sum(free) == 19
    assert not any(in_flight for grammar, in_flight in ahead if grammar is not None)


def test_every_constraint(llm):
    schema = '{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}'
    assert isinstance(json.loads(answer(llm, max_tokens=LONG, **form(json=schema)).text), list)
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", answer(llm, **form(regex=r"\d{3}-[a-f]{2}")).text)
    choices = ("yes", "no", 'a "b"\n', "né😀")
    reply = {
        answer(llm, seed=seed, temperature=5.0, **form(choice=choices)).text for seed in range(30)
    }
    assert reply == set(choices)
    lark = 'start: "SELECT " NAME ("," NAME)? ";"\nNAME: /[a-z]{2}/'
    gbnf = 'root ::= "SELECT " name ("," name)? ";"\nname ::= [a-z] [a-z]'
    for grammar in (lark, gbnf):
        text = answer(llm, **form(grammar=grammar)).text
        assert re.fullmatch("SELECT [a-z]{2}(,[a-z]{2})?;", text)
    start = answer(llm, **form(json_object=True))
    assert start.text.startswith("{")


def test_scripts_written_for_guided_decoding(llm):
    params = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["x"]))
    assert answers(llm, [params])[0].text == "x"


def test_an_answer_ends_where_nothing_can_follow(llm):
    """The answer ends even without an EOS token, and even with min_tokens or ignore_eos."""
    for changes in ({}, {"ignore_eos": True}, {"min_tokens": 15}, {"logit_bias": {98: -1e6}}):
        reply = answer(llm, **form(regex="[ab]{3}"), **changes)
        assert (len(reply.token_ids), reply.finish_reason) == (3, "stop")
    with_end = answer(llm, **form(regex="a*"), logit_bias={EOS: 1e4})
    assert (with_end.token_ids, with_end.finish_reason) == ([EOS], "stop")


def test_an_optional_end(llm):
    """The answer may end or continue after every letter."""
    likely = {"logit_bias": {EOS: 1e4}, **form(regex="[a-z]*")}
    assert len(answer(llm, **likely, min_tokens=4).token_ids) == 5
    endless = answer(llm, **likely, ignore_eos=True)
    assert (len(endless.token_ids), endless.finish_reason) == (20, "length")
    assert EOS not in endless.token_ids
    last = answer(llm, **form(regex="[a-z]{20}"))
    assert (len(last.token_ids), last.finish_reason) == (20, "stop")


def test_the_grammar_takes_precedence(llm):
    """Other parameters do not keep an answer from following its grammar."""
    text = answer(llm, **form(choice=["ab"]), allowed_token_ids=(70, 71), bad_words=((64,),)).text
    assert text == "ab"
    greedy = answer(llm, **form(regex="[xyz]{9}"), temperature=0, repetition_penalty=1.5)
    assert re.fullmatch("[xyz]{9}", greedy.text)


def test_logprobs_are_those_before_the_grammar(llm):
    reply = answer(llm, **form(regex="[ab]{4}"), logprobs=2)
    ranks = [
        logprobs[token].rank
        for token, logprobs in zip(reply.token_ids, reply.logprobs, strict=True)
    ]
    assert max(ranks) > 2, "the constrained token is not the most likely one"


def test_a_model_without_an_eos_token(grammar_model, tmp_path):
    shutil.copytree(grammar_model, tmp_path, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps(settings | {"eos_token_id": None}))
    with LLM(tmp_path, **SMALL) as llm:
        assert llm.facts.eos_token_ids == ()
        reply = answer(llm, max_tokens=LONG, **form(json=SCHEMA))
        assert reply.finish_reason == "stop"
        jsonschema_rs.validate(SCHEMA, json.loads(reply.text))


@pytest.mark.parametrize("executor", ["packed", "library"])
def test_a_failing_matcher_fails_only_its_request(grammar_model, monkeypatch, executor):
    """The matcher here fails in the middle of an answer."""
    with LLM(grammar_model, executor=executor, batching="dynamic", batch_size=3, **SMALL) as llm:
        limited = Grammars.matcher

        class Weak:
            def __init__(self, matcher):
                self._matcher, self._left = matcher, 3

            def __getattr__(self, name):
                return getattr(self._matcher, name)

            def deep_copy(self):
                return Weak(self._matcher.deep_copy())

            def consume_token(self, token_id):
                self._left -= 1
                return self._left > 0 and self._matcher.consume_token(token_id)

            def get_error(self):
                return "ParserTooComplex\nat length"

        def matcher(self, form):
            own = limited(self, form)
            return Weak(own) if form.regex == "[a-z]{9}" else own

        monkeypatch.setattr(Grammars, "matcher", matcher)
        params = [
            SamplingParams(seed=1, max_tokens=12, n=n, **form(regex=regex))
            for n, regex in ((1, "[a-z]{8}"), (2, "[a-z]{9}"), (1, "[0-9]{8}"))
        ]
        texts, failure = {}, None
        prompts = dict(zip("abc", zip(PROMPTS, params, strict=True), strict=True))
        streams = {name: llm.stream(*arguments) for name, arguments in prompts.items()}
        for name, stream in streams.items():
            try:
                texts[name] = "".join(delta.text for delta in stream)
            except RequestError as error:
                failure = name, str(error)
    assert failure == ("b", "structured_outputs: ParserTooComplex at length")
    assert re.fullmatch("[a-z]{8}", texts["a"])
    assert re.fullmatch("[0-9]{8}", texts["c"])


def test_a_regex_that_is_too_complex_only_after_its_first_token_is_the_request_s_error(llm):
    gaps = "|".join(f"(.{{0,{n}}}{letter})" for n, letter in enumerate(ascii_letters * 60))
    with pytest.raises(RequestError, match=r"^structured_outputs: lexer error: too many"):
        answer(llm, **form(regex=f"({gaps}){{1,50}}"))
    assert re.fullmatch("a{4}", answer(llm, **form(regex="a{4}")).text)


class Panicking:
    """A matcher whose library panics at one of its methods."""

    def __init__(self, matcher, method, kind):
        self._matcher, self._method, self._kind = matcher, method, kind

    def __getattr__(self, name):
        return self._fail if name == self._method else getattr(self._matcher, name)

    def _fail(self, *_):
        raise self._kind("why")


@pytest.mark.parametrize("kind", [*ESCAPING, RuntimeError])
@pytest.mark.parametrize("method", ["unsafe_compute_mask_ptr", "consume_token"])
def test_a_panic_of_a_matcher_fails_only_its_request(grammar_model, monkeypatch, method, kind):
    with LLM(grammar_model, **SMALL) as llm:
        usual = Grammars.matcher

        def matcher(self, form):
            own = usual(self, form)
            return Panicking(own, method, kind) if form.regex == "[a-z]{9}" else own

        monkeypatch.setattr(Grammars, "matcher", matcher)
        streams = [
            llm.stream(prompt, SamplingParams(seed=1, max_tokens=9, **form(regex=regex)))
            for prompt, regex in zip(PROMPTS, ("[a-z]{9}", "[0-9]{8}"), strict=False)
        ]
        with pytest.raises(GenerationError, match="why"):
            list(streams[0])
        assert re.fullmatch("[0-9]{8}", "".join(delta.text for delta in streams[1]))


@pytest.mark.parametrize("kind", [*ESCAPING, TypeError])
@pytest.mark.parametrize("name", ["LLMatcher", "LLTokenizer", "regex_to_lark"])
def test_a_panic_of_the_compiler_refuses_the_request(grammar_model, monkeypatch, name, kind):
    def fail(*arguments, **keywords):
        raise kind("why")

    with LLM(grammar_model, **SMALL) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llguidance, name, fail)
            with pytest.raises(RequestError, match="why") as caught:
                answer(llm, **form(regex="[0-9]{8}"))
        assert caught.value.field == "structured_outputs"
        assert re.fullmatch("[0-9]{8}", answer(llm, **form(regex="[0-9]{8}")).text)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": "{"}, "not JSON"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: nowhere"}, "nowhere"),
        ({"grammar": "root ::= ("}, "Expected"),
    ],
)
def test_invalid_constraints_are_rejected(llm, wrong, why):
    with pytest.raises(RequestError, match=why) as caught:
        answer(llm, **form(**wrong))
    assert caught.value.field == "structured_outputs"
    assert not llm.llm_engine.has_work()


def test_a_model_without_a_tokenizer(grammar_model, tmp_path):
    shutil.copytree(grammar_model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    with LLM(tmp_path, **SMALL) as llm, pytest.raises(RequestError, match=r"no tokenizer\.json"):
        answer(llm, **form(regex="a"))


def test_without_llguidance(llm, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match="pip install llguidance"):
        answer(llm, **form(regex="a"))
