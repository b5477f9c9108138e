"""How log-probabilities are written: names, offsets, and what only looks like a text."""

from __future__ import annotations

from container.apis.generation.logprobs import (
    Place,
    chat_logprobs,
    completion_logprobs,
    places_of_prompt,
    prompt_logprobs,
)
from core.sampling import TopLogprobs
from core.text.answer import TokenText
from core.text.tokenizer import Tokenizer
from tests.container.conftest import EOS

SCORE = TopLogprobs(-1.0, 5, (), ())


def offsets(token_ids: list[int], text: str, tokenizer: Tokenizer) -> list[int]:
    scores = [SCORE] * (len(token_ids) - 1)
    return [each.offset for each in places_of_prompt(token_ids, scores, text, tokenizer)]


def test_a_place_says_where_its_text_begins(tokenizer: Tokenizer) -> None:
    text = "a\u00e9b"
    assert offsets(tokenizer.encode(text), text, tokenizer) == [0, 1, 1, 2]
    begun = [EOS, *tokenizer.encode(text)]
    assert offsets(begun, text, tokenizer) == [0, 0, 1, 1, 2], "it is no part of the text"
    assert offsets(begun, f"<eos>{text}", tokenizer) == [0, 5, 6, 6, 7]


def test_a_prompt_s_first_token_follows_nothing(tokenizer: Tokenizer) -> None:
    first, second = places_of_prompt(tokenizer.encode("ab"), [SCORE], "ab", tokenizer)
    assert (first.logprob, first.top) == (None, None)
    assert (second.logprob, second.top) == (-1.0, SCORE)


def test_of_tokens_that_look_alike_the_likelier_is_named(tokenizer: Tokenizer) -> None:
    """Two halves of characters; and the token in the place is named in any case."""
    halves = tokenizer.encode("\u00e9\u20ac")[:2]
    top = TopLogprobs(-3.0, 9, tuple(halves), (-0.5, -0.7))
    (a,) = tokenizer.encode("a")
    record = completion_logprobs([Place(a, 0, -3.0, top)], 2, tokenizer)
    assert record["top_logprobs"] == [{"a": -3.0, "\ufffd": -0.5}]
    assert completion_logprobs([Place(a, 0, -3.0, top)], 0, tokenizer)["top_logprobs"] is None


def test_half_a_character_has_no_bytes(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("\u00e9")[0]
    tokens = [TokenText(half, "", -1.0), TokenText(EOS, "", -2.0)]
    content = chat_logprobs(tokens, tokenizer)["content"]
    assert content == [
        {"token": "\ufffd", "logprob": -1.0, "bytes": None, "top_logprobs": []},
        {"token": "<eos>", "logprob": -2.0, "bytes": list(b"<eos>"), "top_logprobs": []},
    ]


def test_a_prompt_by_token_id(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("ab")
    likely = TopLogprobs(-1.0, 2, (a, b), (-0.5, -1.0))
    assert prompt_logprobs([a, b], [likely], tokenizer) == [
        None,
        {
            str(b): {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
            str(a): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]
