"""Incremental detokenization: no character is split, no part of a stop string is released."""

from __future__ import annotations

from collections import defaultdict

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from core.errors import ConfigurationError
from core.output import Output
from core.sampling import Finish, SamplingParams, TopLogprobs
from core.text.answer import AnswerText
from core.text.bad_words import with_bad_word_ids
from core.text.detokenizer import Detokenization, Detokenizer
from core.text.stopping import StoppableAnswer, StopStrings
from core.text.tokenizer import Tokenizer
from tests.core.conftest import saved


def detokenizer_of(tokenizer, **params):
    return Detokenization(SamplingParams(**params), tokenizer).begin()


def texts(detokenizer, token_ids):
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@given(text=st.text(max_size=30))
def test_pieces_join_to_the_text(byte_level, text):
    pieces = texts(Detokenizer(byte_level), byte_level.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces), "a character was split"


@given(data=st.data())
def test_incremental_decoding_equals_decoding_at_once(byte_level, data):
    """The tokens are whole characters, with special tokens and invalid UTF-8 bytes between them."""
    stray = byte_level.encode("€")[1]
    pieces = [byte_level.encode(text) for text in ("🙂", "é", "€", "to")]
    runs = data.draw(st.lists(st.sampled_from([*pieces, [0], [0, 0], [stray], [stray] * 3])))
    token_ids = [token_id for run in runs for token_id in run]
    prompt = byte_level.encode("to be 🙂")
    pieces = texts(Detokenizer(byte_level, prompt, byte_level.special_ids), token_ids)
    assert "".join(pieces) == byte_level.decode(prompt + token_ids)[len("to be 🙂") :]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
@given(data=st.data())
def test_tokens_with_texts_of_their_own_need_no_window(kind, request, data):
    """The texts are those that decoding a window of tokens gives, token by token."""
    tokenizer = request.getfixturevalue(kind)
    ids = st.lists(st.integers(0, 280), max_size=12)  # some are special, unknown or parts
    prompt, token_ids = data.draw(ids), data.draw(ids)
    slow = Detokenizer(tokenizer, prompt, tokenizer.special_ids)
    slow._own_texts = defaultdict(str)
    assert texts(Detokenizer(tokenizer, prompt, tokenizer.special_ids), token_ids) == texts(
        slow, token_ids
    )


@pytest.mark.parametrize(("kind", "num_own"), [("byte_level", 9), ("byte_fallback", 3)])
def test_texts_of_their_own_are_decoded_once(kind, num_own, request, monkeypatch):
    tokenizer = request.getfixturevalue(kind)
    answer = list(range(3, 3 + num_own))
    expected = texts(Detokenizer(tokenizer), answer * 5)
    detokenizer = Detokenizer(tokenizer)
    first = detokenizer.push(answer[0])
    monkeypatch.setattr(Tokenizer, "decode", None)
    assert [first, *map(detokenizer.push, (answer * 5)[1:])] == expected[:-1]


def test_invalid_bytes_are_released(byte_level):
    stray = byte_level.encode("€")[1]
    detokenizer = Detokenizer(byte_level)
    pieces = [detokenizer.push(stray) for _ in range(8)]
    assert "".join(pieces)


@pytest.mark.parametrize("prompt", ["", "to", "to be"])
def test_spaces_between_prompt_and_answer_are_kept(metaspace, prompt):
    full = metaspace.encode("to be or not to be")
    start = len(metaspace.encode(prompt)) if prompt else 0
    pieces = texts(Detokenizer(metaspace, full[:start]), full[start:])
    assert prompt + "".join(pieces) == "to be or not to be"


def test_special_tokens_have_text_only_on_request(byte_level):
    ids = [*byte_level.encode("to"), 0]
    assert "".join(texts(detokenizer_of(byte_level), ids)) == "to"
    kept = detokenizer_of(byte_level, skip_special_tokens=False)
    assert "".join(texts(kept, ids)) == "to<|end|>"


def test_tokens_without_text_are_not_decoded_again(byte_level, monkeypatch):
    """A client can have thousands of them: `logit_bias` for the end token, and `ignore_eos`."""
    decode, num_decoded = Tokenizer.decode, 0

    def counted(self, token_ids, **how):
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(self, token_ids, **how)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    unknown = 5000
    ids = [*byte_level.encode("to"), *[0, unknown] * 200, *byte_level.encode(" be")]
    assert "".join(texts(detokenizer_of(byte_level), ids)) == "to be"
    assert num_decoded < 100


def test_truncation_keeps_the_end_and_the_special_tokens(tmp_path):
    words = {"<s>": 0, "a": 1, "b": 2, "c": 3}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    tokenizer = saved(tokenizer, tmp_path)
    assert tokenizer.encode("a b c") == [0, 1, 2, 3]
    assert tokenizer.encode("a b c", max_tokens=3) == [0, 2, 3]
    assert tokenizer.encode("a b c", max_tokens=1) == [0]
    assert tokenizer.encode("a b c", max_tokens=2, add_special_tokens=False) == [2, 3]
    assert tokenizer.encode("a b c", max_tokens=9) == [0, 1, 2, 3]


def test_selected_special_tokens_may_be_kept(byte_level):
    ids = [*byte_level.encode("to"), 0]
    for kept, text in [({0}, "to<|end|>"), ({1}, "to")]:
        detokenization = Detokenization(SamplingParams(), byte_level, kept_special_ids=kept)
        assert "".join(texts(detokenization.begin(), ids)) == text


def test_the_error_for_a_missing_tokenizer_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigurationError, match="save_pretrained"):
        Tokenizer(tmp_path)


@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_text_is_cut_at_the_first_stop_string(text, stops, data):
    pieces, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    checker = StopStrings(stops)
    released, seen, whole = "", "", None
    for piece in pieces:
        seen += piece
        released += checker.push(piece)
        places = [seen.find(stop) for stop in stops if stop in seen]
        if places:
            # Later pieces are not read. The text is cut before the earliest stop string so far.
            whole = seen[: min(places)]
            break
        assert not any(stop in released for stop in stops)
    assert checker.is_reached == (whole is not None)
    assert released + checker.flush() == (text if whole is None else whole)


def test_a_possible_start_of_a_stop_string_is_held_back():
    checker = StopStrings(["</s>"])
    assert [checker.push(piece) for piece in ("a<", "/", "b", "</", "s>c")] == [
        "a", "", "</b", "", "",
    ]  # fmt: skip
    assert checker.is_reached


def push_all(answer, ids, finish):
    for position, token_id in enumerate(ids, 1):
        answer.push(Output(0, (token_id,), (-1.0,), finish if position == len(ids) else None))
        if answer.finish is not None:
            return position
    return len(ids)


@pytest.mark.parametrize("finish", [Finish.EOS, Finish.LENGTH])
def test_held_back_text_is_released_at_the_end(byte_level, finish):
    ids = byte_level.encode("to be 🙂")[:-1]
    answer = StoppableAnswer(Detokenization(SamplingParams(stop="be not"), byte_level))
    assert push_all(answer, ids, finish) == len(ids)
    assert answer.text == byte_level.decode(ids)
    assert answer.finish == finish


def test_an_answer_ends_at_its_stop_string(byte_level):
    ids = byte_level.encode("to be or not to be")
    answer = StoppableAnswer(Detokenization(SamplingParams(stop="or n"), byte_level))
    assert push_all(answer, ids, Finish.LENGTH) < len(ids)
    assert answer.text == "to be "
    assert answer.finish == Finish.STOP
    assert "".join(token.text for token in answer.tokens) == "to be "


def test_a_stop_string_may_be_included(byte_level):
    ids = byte_level.encode("to be or not to be")
    params = SamplingParams(stop="or n", include_stop_str_in_output=True)
    answer = StoppableAnswer(Detokenization(params, byte_level))
    push_all(answer, ids, Finish.LENGTH)
    assert answer.text == "to be or n"
    assert answer.finish == Finish.STOP


@given(
    text=st.text("ab", max_size=12),
    stop=st.text("ab", min_size=1, max_size=3),
    size=st.integers(0, 12),
)
def test_stop_strings_in_exempt_text_are_ignored(text, stop, size):
    checker = StopStrings([stop])
    released = "".join(
        checker.push(letter, is_exempt=place < size) for place, letter in enumerate(text)
    )
    ends = [end for end in range(len(text) + 1) if end > size and text[:end].endswith(stop)]
    assert checker.is_reached == bool(ends)
    assert released + checker.flush() == (text[: ends[0] - len(stop)] if ends else text)


def test_min_tokens_applies_to_stop_strings(byte_level):
    ids = byte_level.encode("to be or to be")
    first = len(byte_level.encode("to be"))
    params = SamplingParams(stop="be", min_tokens=first, max_tokens=99)
    answer = StoppableAnswer(Detokenization(params, byte_level))
    push_all(answer, ids, Finish.LENGTH)
    assert answer.text == "to be or to "


def test_top_logprobs_stay_with_their_tokens(byte_level):
    answer = AnswerText(Detokenization(SamplingParams(), byte_level))
    top = TopLogprobs(-1.0, 1, (5,), (-1.0,))
    answer.push(Output(0, (5, 6), (-1.0, -2.0), top_logprobs=(top, top)))
    answer.push(Output(0, (7,), (-1.0,)))
    assert [token.top_logprobs for token in answer.tokens] == [top, top, None]


@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    """A word tokenizer whose decoder puts spaces between all tokens, including special ones."""
    vocabulary = {"a": 0, "b": 1, "<x>": 2, "<y>": 3}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<x>", "<y>"])
    return saved(tokenizer, tmp_path_factory.mktemp("spaced"))


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "a b a"),
        ({"skip_special_tokens": False}, "a <x> <y> <y> b <x> a"),
        (
            {"skip_special_tokens": False, "spaces_between_special_tokens": False},
            "a <x><y><y> b <x> a",
        ),
        ({"spaces_between_special_tokens": False}, "a b a"),
    ],
)
def test_special_tokens_and_the_spaces_between_them(spaced, params, text):
    answer = AnswerText(Detokenization(SamplingParams(**params), spaced))
    push_all(answer, [0, 2, 3, 3, 1, 2, 0], Finish.LENGTH)
    assert answer.text == text


def test_bad_words_as_tokens(byte_level, metaspace, spaced):
    def ids(tokenizer, *words):
        return with_bad_word_ids(SamplingParams(bad_words=words), tokenizer).bad_words

    [to], [spaced_to] = byte_level.encode("to"), byte_level.encode(" to")
    assert ids(byte_level, "to") == ids(byte_level, " to") == ((to,), (spaced_to,))
    assert ids(byte_level, "to", (9, 9)) == ((to,), (spaced_to,), (9, 9))
    assert ids(byte_level, " ") == (tuple(byte_level.encode(" ")),)
    assert len(byte_level.encode(" z")) == 2
    assert ids(byte_level, "z") == (tuple(byte_level.encode("z")),), (
        "the spelling with a space has more tokens and is not forbidden"
    )
    assert ids(metaspace, "to") == (tuple(metaspace.encode("to")),), (
        "both spellings are the same tokens"
    )
    assert ids(spaced, "b") == ((1,),)
    params = SamplingParams(bad_words=((1, 2),))
    assert with_bad_word_ids(params, byte_level) is params


def test_a_piece_is_decoded_as_in_the_middle_of_a_text(byte_level, metaspace):
    assert "".join(map(metaspace.piece, metaspace.encode("to be not"))) == " to be not"
    assert [*map(byte_level.piece, byte_level.encode("to be<|end|>"))][-1] == "<|end|>"
    assert [*map(byte_level.piece, byte_level.encode("\u00e9"))] == ["\ufffd", "\ufffd"]
