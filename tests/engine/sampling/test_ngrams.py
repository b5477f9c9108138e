"""`no_repeat_ngram_size` gives transformers' tokens in every strategy, also with overlap."""

from __future__ import annotations

import pytest

from core.sampling import Sampled, SamplingParams
from core.sequence import Sequence
from engine import LLM
from engine.sampling.ngrams import NgramIndex
from tests.engine.greedy_answers import NUM_NEW, STRATEGIES, generate, prompts

SMALL = {"dtype": "fp32", "block_size": 4, "max_rolling_batch_prefill_tokens": 10}
SIZES = (1, 2, 3)


@pytest.fixture(scope="module")
def expected(tiny_model):
    """Return transformers' answers by architecture and size; the prompts repeat n-grams."""
    known = {}

    def answers_of(architecture, size):
        key = architecture, size
        if key not in known:
            known[key] = generate(tiny_model(architecture), no_repeat_ngram_size=size)
        return known[key]

    return answers_of


def answers(llm, *sizes, **changes):
    """Return the answers to all prompts, which take the sizes in turn."""
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=NUM_NEW,
            no_repeat_ngram_size=sizes[at % len(sizes)],
            **changes,
        )
        for at, _ in enumerate(prompts())
    ]
    results = llm.generate(prompts(), params, use_tqdm=False)
    return [result.outputs[0].token_ids for result in results]


def cut(token_ids):
    """Return the tokens without transformers' padding after EOS."""
    return token_ids[: token_ids.index(0) + 1] if 0 in token_ids else token_ids


@pytest.mark.matrix
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("batching", STRATEGIES)
def test_tokens_equal_generate(tiny_model, expected, batching, overlaps):
    """The rows of a batch have different n-gram sizes, and two have none. `paged` preempts."""
    options = {"num_kv_blocks": 12} if batching == "paged" else {}
    with LLM(
        tiny_model("gpt2"), batching=batching, async_scheduling=overlaps,
        **options, **SMALL, **STRATEGIES[batching],
    ) as llm:  # fmt: skip
        sizes = (0, *SIZES)
        wanted = [cut(expected("gpt2", sizes[at % 4])[at]) for at, _ in enumerate(prompts())]
        assert answers(llm, *sizes) == wanted
        assert (llm.llm_engine.strategy.num_preemptions > 0) == (batching == "paged")


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", ["bloom", "t5"])
@pytest.mark.parametrize("size", SIZES)
def test_tokens_equal_generate_in_the_library_executor(tiny_model, expected, architecture, size):
    """t5's encoder reads its prompt, whose n-grams do not count. With size 1, counting them would
    ban tokens from the first one on."""
    with LLM(tiny_model(architecture), executor="library", dtype="fp32") as llm:
        wanted = [cut(tokens) for tokens in expected(architecture, size)]
        # transformers counts t5's start token, which is also the EOS token of this model. So with
        # size 1, an answer never ends early; min_tokens has the same effect in our engine.
        changes = {"min_tokens": NUM_NEW} if (architecture, size) == ("t5", 1) else {}
        assert answers(llm, size, **changes) == wanted
    assert wanted != [cut(tokens) for tokens in expected(architecture, 0)]


def repeating(size, prompt, answer=(), *, with_prompt=True):
    params = SamplingParams(max_tokens=99, no_repeat_ngram_size=size)
    sequence, ngrams = (
        Sequence(0, prompt, params),
        NgramIndex(size, 0 if with_prompt else len(prompt)),
    )
    found = set(ngrams.followers(sequence.token_ids))
    for token in answer:
        sequence.append(Sampled((token,), (0.0,)))
        found = set(ngrams.followers(sequence.token_ids))
    return found


def test_banned_tokens():
    assert repeating(3, [1, 2, 3, 9, 1, 2]) == {3}
    assert repeating(3, [1, 2, 3, 1, 2, 4], [1, 2]) == {3, 4}
    assert repeating(3, [7, 7, 7]) == {7}
    assert repeating(3, [7, 7]) == set()
    assert repeating(2, [1, 2, 1]) == {2}
    assert repeating(1, [4, 5], [6]) == {4, 5, 6}
    assert repeating(3, [1, 2, 3], [1, 2]) == {3}
    assert repeating(3, [1, 2, 3], [1, 2], with_prompt=False) == set()
    assert repeating(2, [1, 2, 3], [3, 4, 3], with_prompt=False) == {4}
    assert repeating(9, [1, 2]) == set()
