"""Every sampling parameter through the whole engine: alone, mixed, with overlap and preemption."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.errors import RequestError
from core.sampling import NO_LIMIT
from engine import LLM, SamplingParams
from engine.scores import column as prompt_scores
from tests.engine.greedy_answers import STRATEGIES
from tests.engine.greedy_answers import prompts as five_prompts
from tests.engine.tiny_models import VOCABULARY

SMALL = {"dtype": "fp32", "block_size": 4, "max_rolling_batch_prefill_tokens": 10}
EVERYTHING = [
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "temperature": 0.6, "top_k": 5},
    {"seed": 3, "top_p": 0.7},
    {"seed": 4, "min_p": 0.1},
    {"seed": 5, "typical_p": 0.5},
    {"temperature": 0, "repetition_penalty": 1.8},
    {"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 1.0},
    {"seed": 6, "logit_bias": {5: 4.0, 6: -100.0}},
    {"temperature": 0, "bad_words": ((11,), (58, 55)), "logprobs": 2},
    {"seed": 7, "min_tokens": 10, "logit_bias": {0: 6.0}, "ignore_eos": False},
    {"seed": 8, "temperature": 1.7, "top_k": 60, "top_p": 0.95, "min_p": 0.001, "typical_p": 0.99,
     "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1,
     "logit_bias": {9: 1.0}, "bad_words": ((8, 8),), "min_tokens": 5, "logprobs": 3,
     "prompt_logprobs": 2},
    {"temperature": 0, "prompt_logprobs": 0, "logprobs": 0},
    {"seed": 9, "allowed_token_ids": tuple(range(3, 40, 3))},
]  # fmt: skip


def params(**changes):
    return SamplingParams(**({"max_tokens": 14, "ignore_eos": True} | changes))


def mixed():
    """Return a prompt and parameters for each row of a batch."""
    prompts = five_prompts()
    return [(prompts[place % 5], params(**changes)) for place, changes in enumerate(EVERYTHING)]


def answers(llm, requests):
    prompts, each_params = zip(*requests, strict=True)
    results = llm.generate(list(prompts), list(each_params), use_tqdm=False)
    return [(result.outputs[0].token_ids, result.outputs[0].finish_reason) for result in results]


@pytest.fixture(scope="module")
def alone(tiny_model):
    """Return the answers of one request after another, without overlap."""
    llm = LLM(tiny_model("llama"), batching="none", async_scheduling=False, **SMALL)
    return [answers(llm, [request])[0] for request in mixed()]


def test_every_parameter_has_an_effect(tiny_model, alone):
    llm = LLM(tiny_model("llama"), batching="none", **SMALL)
    neutral = {"temperature": 1.0, "prompt_logprobs": None, "logprobs": None}
    for (prompt, _), settings, acted in zip(mixed(), EVERYTHING, alone, strict=True):
        kept = {name: settings.get(name) for name in ("temperature", "seed") if name in settings}
        if settings.keys() - kept.keys() - neutral.keys():
            assert answers(llm, [(prompt, params(**kept))])[0] != acted, settings


@pytest.mark.matrix
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("batching", STRATEGIES)
def test_a_mixed_batch_equals_single_requests(tiny_model, alone, batching, overlaps):
    """`paged` has so little memory that it preempts."""
    llm = LLM(
        tiny_model("llama"),
        batching=batching,
        async_scheduling=overlaps,
        num_kv_blocks=14 if batching == "paged" else 60,
        **SMALL,
        **STRATEGIES[batching],
    )
    assert answers(llm, mixed()) == alone
    if batching == "paged":
        assert llm.llm_engine.strategy.num_preemptions > 0


@pytest.mark.parametrize("batching", ["none", "dynamic"])
def test_the_library_executor_gives_the_same_answers(tiny_model, alone, batching):
    llm = LLM(
        tiny_model("llama"),
        batching=batching,
        executor="library",
        dtype="fp32",
        **STRATEGIES[batching],
    )
    assert answers(llm, mixed()) == alone


def logprobs_of(path, token_ids):
    """Return [L, vocabulary]: transformers' logprobs of the token after each token."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].log_softmax(-1)


def check(named, expected, token_id, count):
    """Check one position: its token and the `count` most likely, with ranks."""
    ranked = expected.argsort(descending=True).tolist()
    rank = ranked.index(token_id) + 1
    assert next(iter(named)) == token_id
    assert set(named) == {token_id, *ranked[:count]}
    for id, logprob in named.items():
        assert logprob.rank == ranked.index(id) + 1
        assert logprob.logprob == pytest.approx(expected[id].item(), abs=1e-4)
    assert named[token_id].rank == rank


@pytest.mark.matrix
@pytest.mark.parametrize(
    "settings",
    [
        {"batching": "none"},
        {"batching": "dynamic", "batch_size": 3, "max_batch_delay": 0},
        {"batching": "continuous", "async_scheduling": True},
        {"batching": "paged", "num_kv_blocks": 14},
        {"batching": "paged", "num_kv_blocks": 14, "async_scheduling": True},
        {"batching": "dynamic", "batch_size": 3, "max_batch_delay": 0, "executor": "library"},
    ],
    ids=str,
)
@pytest.mark.parametrize("max_rows", [256, 3])
def test_logprobs_equal_those_of_transformers(tiny_model, monkeypatch, settings, max_rows):
    """Prompts and answers have logprobs, in a mixed batch with chunked prompts and split steps."""
    for module in ("engine.scores.column", "engine.scores.library"):
        monkeypatch.setattr(f"{module}.MAX_SCORED_ROWS", max_rows)
    path = tiny_model("llama")
    counts = [(4, 3), (None, 2), (2, None), (0, 0), (1, 20)]
    requests = [
        params(seed=place, temperature=1.5, logprobs=answer, prompt_logprobs=prompt)
        for place, (prompt, answer) in enumerate(counts)
    ]
    llm = LLM(path, **(SMALL | settings))
    results = llm.generate(five_prompts(), requests, use_tqdm=False)
    if "num_kv_blocks" in settings:
        assert llm.llm_engine.strategy.num_preemptions > 0
    for result, (num_prompt, num_answer) in zip(results, counts, strict=True):
        prompt, output = result.prompt_token_ids, result.outputs[0]
        expected = logprobs_of(path, prompt + output.token_ids)
        total = sum(expected[len(prompt) - 1 + n, id] for n, id in enumerate(output.token_ids))
        assert output.cumulative_logprob == pytest.approx(total.item(), abs=1e-2)
        assert (result.prompt_logprobs is None) == (num_prompt is None)
        assert (output.logprobs is None) == (num_answer is None)
        if result.prompt_logprobs is not None:
            assert result.prompt_logprobs[0] is None
            assert len(result.prompt_logprobs) == len(prompt)
            for place, named in enumerate(result.prompt_logprobs[1:]):
                check(named, expected[place], prompt[place + 1], num_prompt)
        if output.logprobs is not None:
            assert len(output.logprobs) == len(output.token_ids)
            for place, named in enumerate(output.logprobs):
                row = expected[len(prompt) - 1 + place]
                check(named, row, output.token_ids[place], num_answer)


@pytest.mark.parametrize("architecture", ["bloom", "minimax"])
def test_prompt_logprobs_in_the_library_executor(tiny_model, architecture):
    path = tiny_model(architecture)
    llm = LLM(path, batching="none", dtype="fp32")
    assert llm.facts.executor == "library"
    [result] = llm.generate([[5, 6, 7, 8]], params(prompt_logprobs=2), use_tqdm=False)
    expected = logprobs_of(path, [5, 6, 7, 8])
    for place, named in enumerate(result.prompt_logprobs[1:]):
        check(named, expected[place], 6 + place, 2)


def test_encoder_decoder_models_have_no_prompt_logprobs(tiny_model):
    llm = LLM(tiny_model("t5"), dtype="fp32")
    with pytest.raises(RequestError, match="prompt_logprobs: not available for an encoder-decoder"):
        llm.generate([[5, 6]], params(prompt_logprobs=1), use_tqdm=False)


def test_a_step_computes_logits_of_few_rows_at_once(tiny_model, monkeypatch):
    """The limit is 8 rows here, and every row of long chunks is scored."""
    llm, seen = LLM(tiny_model("llama"), dtype="fp32"), []
    rank = prompt_scores.rank
    monkeypatch.setattr("engine.scores.column.MAX_SCORED_ROWS", 8)
    monkeypatch.setattr(
        prompt_scores,
        "rank",
        lambda logits, *args: (seen.append(len(logits)), rank(logits, *args))[1],
    )
    requests = [([3] * 30, params(prompt_logprobs=0)), ([4] * 21, params(prompt_logprobs=0))]
    answers(llm, requests)
    assert sum(seen) == 29 + 20
    assert max(seen) == 8


@pytest.mark.parametrize("overlaps", [False, True])
def test_prompt_logprobs_cost_no_extra_step(tiny_model, monkeypatch, overlaps):
    llm, steps = LLM(tiny_model("llama"), async_scheduling=overlaps, **SMALL), []
    step = llm.llm_engine.step
    monkeypatch.setattr(llm.llm_engine, "step", lambda *args: (steps.append(args), step(*args))[1])
    for scored in (None, 1):
        answers(llm, [([3] * 35, params(prompt_logprobs=scored))])
    assert len(steps) == 2 * (4 + 13 + overlaps)


@pytest.fixture(scope="module")
def llm(tiny_model):
    return LLM(tiny_model("llama"), **SMALL)


def answer(llm, prompt=(5, 6), **changes):
    [result] = llm.generate([list(prompt)], params(**changes), use_tqdm=False)
    return result


def test_min_tokens_and_ends(llm):
    biased = {"temperature": 0, "ignore_eos": False, "logit_bias": {0: 100.0}}
    assert answer(llm, **biased).outputs[0].token_ids == [0]
    ids = answer(llm, **biased, min_tokens=4).outputs[0].token_ids
    assert len(ids) == 5
    assert ids.index(0) == 4


def test_bad_words_of_token_ids_do_not_appear(llm):
    free = answer(llm, temperature=0).outputs[0].token_ids
    word = tuple(free[2:5])
    barred = answer(llm, temperature=0, bad_words=(word,)).outputs[0].token_ids
    assert barred[:4] == free[:4]
    assert barred[4] != free[4]


def test_truncation_keeps_the_end_of_the_prompt(llm):
    long = list(range(1, 60))
    truncated = answer(llm, long, temperature=0, truncate_prompt_tokens=5)
    assert truncated.prompt_token_ids == long[-5:]
    short = answer(llm, long[-5:], temperature=0)
    assert truncated.outputs[0].token_ids == short.outputs[0].token_ids
    id = llm.llm_engine.add(long, params(truncate_prompt_tokens=5), 0.0)
    [waiting] = llm.llm_engine.strategy.waiting
    assert waiting.sequences[0].token_ids == long[-5:], "the engine truncates without `LLM`, too"
    llm.llm_engine.abort(id)
    limit = llm.facts.max_model_len
    over = [1 + n % 90 for n in range(limit + 7)]
    with pytest.raises(RequestError, match="max_model_len"):
        answer(llm, over)
    fitted = answer(llm, over, temperature=0, truncate_prompt_tokens=-1)
    assert fitted.prompt_token_ids == over[-(limit - 14) :]


def test_max_tokens_none_means_as_many_as_fit(llm):
    result = answer(llm, list(range(1, 90)), max_tokens=None)
    assert len(result.outputs[0].token_ids) == llm.facts.max_model_len - 89
    assert SamplingParams(max_tokens=None).max_tokens == NO_LIMIT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {VOCABULARY: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("bad_words", ((VOCABULARY,),)),
        ("bad_words", ("a text",)),
    ],
)
def test_token_ids_outside_the_vocabulary_are_rejected(llm, field, value):
    with pytest.raises(RequestError) as caught:
        answer(llm, **{field: value})
    assert caught.value.field == field
    assert not llm.llm_engine.has_work()
