"""Beam search equals transformers', in all strategies and with little memory."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from core.errors import RequestError
from core.sampling import MAX_LENGTH_PENALTY, NO_LIMIT
from engine import LLM, SamplingParams
from tests.engine.greedy_answers import STRATEGIES, prompts
from tests.engine.memory.test_states import poison

NUM_NEW = 10
SMALL = {"dtype": "fp32", "block_size": 4, "max_rolling_batch_prefill_tokens": 10}
SEARCHES = {
    "plain": {"num_beams": 3},
    "long": {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never"},
    "many stops": {"num_beams": 4, "length_penalty": 0.6, "stop_token_ids": (5, 17, 40, 61, 88)},
    "early": {"num_beams": 3, "n": 2, "early_stopping": True, "stop_token_ids": (5, 17, 40, 61)},
    "never": {"num_beams": 2, "n": 2, "early_stopping": "never", "length_penalty": 2.0,
              "stop_token_ids": (5, 17, 40, 61)},
    "short": {"num_beams": 3, "n": 3, "length_penalty": -1.0, "stop_token_ids": (5, 17, 40, 61)},
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(tiny_model):
    known = {}

    def beams_of(architecture, search):
        if (architecture, search) not in known:
            known[architecture, search] = generate(tiny_model(architecture), **SEARCHES[search])
        return known[architecture, search]

    return beams_of


def generate(path, *, n=1, stop_token_ids=(), **search):
    """Return transformers' answers, best first, each cut after the token that ended it."""
    is_t5 = path.name == "t5"
    kind = AutoModelForSeq2SeqLM if is_t5 else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    answers, stops = [], {0, *stop_token_ids}
    for prompt in prompts():
        rows = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=sorted(stops),
            num_return_sequences=n,
            **search,
        )
        answers.append([cut(row[1 if is_t5 else len(prompt) :], stops) for row in rows.tolist()])
    return answers


def cut(tokens, stops):
    ends = [place for place, token in enumerate(tokens, 1) if token in stops]
    return tokens[: ends[0]] if ends else tokens


def answers(llm, search, times=1):
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, **SEARCHES[search])
    requests = llm.generate(prompts() * times, params, use_tqdm=False)
    assert llm.llm_engine.strategy.memory.num_held_blocks == 0
    assert not llm.llm_engine.strategy._group_of
    return [[output.token_ids for output in request.outputs] for request in requests]


@pytest.mark.matrix
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("batching", STRATEGIES)
@pytest.mark.parametrize("search", SEARCHES)
def test_beams_in_all_strategies(tiny_model, expected, batching, search, overlaps):
    options = {"num_kv_blocks": 100, **STRATEGIES[batching]}
    llm = LLM(tiny_model("llama"), batching=batching, async_scheduling=overlaps, **options, **SMALL)
    assert answers(llm, search) == expected("llama", search)


@pytest.mark.matrix
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_beams_under_constant_preemption(tiny_model, expected, architecture, mode, overlaps):
    llm = LLM(
        tiny_model(architecture),
        num_kv_blocks=20,
        preemption_mode=mode,
        enable_prefix_caching=False,
        async_scheduling=overlaps,
        **SMALL,
    )
    admit_what_fits_now(llm.llm_engine.strategy)
    assert answers(llm, "long", times=3) == expected(architecture, "long") * 3
    assert llm.llm_engine.strategy.num_preemptions > 0
    assert (llm.llm_engine.strategy.num_swaps > 0) == (mode == "swap")


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
def test_beams_of_layers_with_windows(tiny_model, expected, architecture):
    llm = LLM(tiny_model(architecture), num_kv_blocks=20, **SMALL)
    assert answers(llm, "long", times=3) == expected(architecture, "long") * 3


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_5_text", "bamba"])
@pytest.mark.parametrize("way", [*STRATEGIES, "swap"])
def test_beams_of_layers_with_states(tiny_model, expected, architecture, way):
    """States that no beam keeps are NaN before each step. `paged` preempts, and drops states."""
    is_paged = way in ("paged", "swap")
    options = SMALL | {"max_rolling_batch_prefill_tokens": 20, "batching": way, "num_kv_blocks": 60}
    options |= STRATEGIES.get(way, {})
    if is_paged:
        mode = "swap" if way == "swap" else "recompute"
        options |= {"batching": "paged", "num_kv_blocks": 20, "preemption_mode": mode}
    llm = LLM(tiny_model(architecture), **options)
    strategy = llm.llm_engine.strategy
    if is_paged:
        admit_what_fits_now(strategy)
    poison(llm)
    assert answers(llm, "long", times=2) == expected(architecture, "long") * 2
    assert (strategy.num_preemptions > 0) == is_paged
    assert (strategy.num_swaps > 0) == (way == "swap")
    assert not strategy.memory.states.slots.held


def admit_what_fits_now(strategy):
    """Make the strategy admit without a reserve of blocks, so that it soon has to preempt."""

    def has_room_for(group):
        lengths = [sequence.num_tokens for sequence in group.sequences]
        memory = strategy.memory
        needed = memory.blocks_for(lengths, group.num_shared_tokens)
        return needed - len(memory.held(group.sequences[0].id)) <= memory.num_free_blocks

    strategy._has_room_for = has_room_for


@pytest.mark.matrix
@pytest.mark.parametrize("search", ["many stops", "early"])
@pytest.mark.parametrize("architecture", ["bloom", "t5"])
@pytest.mark.parametrize("batching", ["none", "dynamic"])
def test_beams_in_the_library_executor(tiny_model, expected, architecture, batching, search):
    llm = LLM(tiny_model(architecture), batching=batching, dtype="fp32", num_kv_blocks=100,
              **STRATEGIES[batching])  # fmt: skip
    assert llm.facts.executor == "library"
    assert answers(llm, search) == expected(architecture, search)


def test_beams_and_samples_run_in_one_batch(tiny_model, expected):
    llm = LLM(tiny_model("llama"), num_kv_blocks=60, **SMALL)
    search = SamplingParams(max_tokens=NUM_NEW, num_beams=3)
    sampled = SamplingParams(seed=4, max_tokens=NUM_NEW, n=2)
    alone = llm.generate(prompts()[0], sampled, use_tqdm=False)[0].outputs
    requests = llm.generate(
        [*prompts(), prompts()[0]], [search] * len(prompts()) + [sampled], use_tqdm=False
    )
    found = [[request.outputs[0].token_ids] for request in requests[:-1]]
    assert found == expected("llama", "plain")
    assert [output.token_ids for output in requests[-1].outputs] == [
        output.token_ids for output in alone
    ]


def test_requests_that_can_never_run_are_rejected(tiny_model):
    llm = LLM(tiny_model("llama"), num_kv_blocks=20, max_model_len=64, **SMALL)
    with pytest.raises(RequestError, match="num_beams: 8 beams of 60 tokens"):
        llm.generate([1] * 10, SamplingParams(max_tokens=50, num_beams=8), use_tqdm=False)
    with pytest.raises(RequestError, match="num_beams"):
        llm.generate([1], SamplingParams(max_tokens=2, num_beams=11), use_tqdm=False)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"num_beams": 3, "temperature": 0.5}, "temperature"),
        ({"num_beams": 3, "top_p": 0.5}, "top_p"),
        ({"num_beams": 3, "repetition_penalty": 1.5}, "repetition_penalty"),
        ({"num_beams": 3, "n": 4}, "num_beams"),
        ({"num_beams": 0}, "num_beams"),
        ({"use_beam_search": True, "best_of": 3, "top_k": 4}, "top_k"),
    ],
)
def test_parameters_that_beam_search_would_ignore_are_rejected(params, field):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert caught.value.field == field


def test_vllms_beam_search_parameters():
    assert SamplingParams(use_beam_search=True, best_of=3).beam_width == 3
    assert SamplingParams(use_beam_search=True, n=2).beam_width == 2
    assert SamplingParams(use_beam_search=True).beam_width == 0
    assert SamplingParams(use_beam_search=True).is_greedy
    assert SamplingParams(n=2).beam_width == 0


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_length_penalty_is_bounded_by_the_range_of_floats(sign):
    limit = sign * MAX_LENGTH_PENALTY
    assert 0.0 < NO_LIMIT**limit < float("inf")
    assert SamplingParams(num_beams=2, length_penalty=limit).length_penalty == limit
    for beyond in (limit * 1.01, sign * 2000, sign * 1e308, sign * float("inf"), float("nan")):
        with pytest.raises(RequestError, match="length_penalty: must be -32 to 32"):
            SamplingParams(num_beams=2, length_penalty=beyond)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(
    ("architecture", "batching"), [*(("llama", name) for name in STRATEGIES), ("t5", "dynamic")]
)
def test_searches_with_the_strongest_length_penalties_end(tiny_model, architecture, batching, sign):
    llm = LLM(tiny_model(architecture), batching=batching, dtype="fp32", num_kv_blocks=100,
              **STRATEGIES[batching])  # fmt: skip
    for early_stopping in (False, True, "never"):
        params = SamplingParams(
            max_tokens=NUM_NEW,
            num_beams=2,
            length_penalty=sign * MAX_LENGTH_PENALTY,
            early_stopping=early_stopping,
            stop_token_ids=(5, 17, 40, 61),
        )
        results = llm.generate(prompts(), params, use_tqdm=False)
        assert all(result.outputs[0].token_ids for result in results)
