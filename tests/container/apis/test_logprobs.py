"""The format of log-probabilities: token names, text offsets and bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from container.apis.completions.echo import echoed_prompt
from container.apis.generation.generation import Generation
from container.apis.generation.logprobs import ScoredToken, chat_logprobs, completion_logprobs
from container.apis.scores import prompt_logprobs
from core.sampling import TopLogprobs
from core.text.answer import TokenText
from core.text.tokenizer import Tokenizer
from tests.container.conftest import EOS

SCORE = TopLogprobs(-1.0, 5, (), ())


def generation(token_ids: list[int], *scores: TopLogprobs) -> Generation:
    received = SimpleNamespace(prompt_logprobs=scores)
    return cast(Generation, SimpleNamespace(prompt_token_ids=token_ids, received=received))


def offsets(token_ids: list[int], text: str, tokenizer: Tokenizer) -> list[int]:
    scored = generation(token_ids, *[SCORE] * (len(token_ids) - 1))
    return [token.offset for token in echoed_prompt(scored, text, tokenizer)]


def test_offsets_are_where_token_texts_begin(tokenizer: Tokenizer) -> None:
    text = "a\u00e9b"
    assert offsets(tokenizer.encode(text), text, tokenizer) == [0, 1, 1, 2]
    begun = [EOS, *tokenizer.encode(text)]
    assert offsets(begun, text, tokenizer) == [0, 0, 1, 1, 2], "<eos> is not in the text"
    assert offsets(begun, f"<eos>{text}", tokenizer) == [0, 5, 6, 6, 7]


def test_a_prompts_first_token_has_no_logprob(tokenizer: Tokenizer) -> None:
    scored = generation(tokenizer.encode("ab"), SCORE)
    first, second = echoed_prompt(scored, "ab", tokenizer)
    assert (first.logprob, first.top_logprobs) == (None, None)
    assert (second.logprob, second.top_logprobs) == (-1.0, SCORE)


def test_of_tokens_with_equal_text_the_likelier_is_kept(tokenizer: Tokenizer) -> None:
    """Each of the two tokens of a character has the text U+FFFD. The sampled token is always
    included.
    """
    halves = tokenizer.encode("\u00e9\u20ac")[:2]
    top = TopLogprobs(-3.0, 9, tuple(halves), (-0.5, -0.7))
    (a,) = tokenizer.encode("a")
    record = completion_logprobs([ScoredToken(a, 0, -3.0, top)], 2, tokenizer.piece)
    assert record["top_logprobs"] == [{"a": -3.0, "\ufffd": -0.5}]
    record = completion_logprobs([ScoredToken(a, 0, -3.0, None)], 0, tokenizer.piece)
    assert record["top_logprobs"] == [{"a": -3.0}]


def test_incomplete_characters_have_no_bytes(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("\u00e9")[0]
    tokens = [TokenText(half, "", -1.0), TokenText(EOS, "", -2.0)]
    content = chat_logprobs(tokens, tokenizer.piece)
    assert content == [
        {"token": "\ufffd", "logprob": -1.0, "bytes": None, "top_logprobs": []},
        {"token": "<eos>", "logprob": -2.0, "bytes": list(b"<eos>"), "top_logprobs": []},
    ]


def test_prompt_logprobs_by_token_id(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("ab")
    likely = TopLogprobs(-1.0, 2, (a, b), (-0.5, -1.0))
    assert prompt_logprobs(generation([a, b], likely), tokenizer) == [
        None,
        {
            str(b): {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
            str(a): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]
