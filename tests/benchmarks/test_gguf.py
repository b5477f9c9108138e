"""The comparison of answers with llama.cpp's server: what it finds equal, explained or not."""

from __future__ import annotations

import math

import pytest

from benchmarks.gguf.__main__ import Answer, compare


def answer(*places, prompt=(1, 2)):
    """Return an answer of the first token of each place's scores."""
    return Answer(list(prompt), [next(iter(place)) for place in places], list(places))


def test_equal_answers_and_their_largest_error():
    ours, theirs = answer({5: -1.0, 6: -2.0}, {7: -1.0}), answer({5: -1.1, 6: -2.4}, {7: -3.0})
    found = compare("Q8_0", [ours], [theirs])
    assert (found.tokens, found.gaps, found.same_prompts) == (2, [], True)
    assert found.largest_error == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("scores", "gap", "unexplained"),
    [({6: -1.0, 5: -1.1}, 0.2, 0), ({6: -1.0, 5: -1.9}, 1.0, 1), ({6: -1.0}, math.inf, 1)],
)
def test_answers_part_within_the_error_or_not(scores, gap, unexplained):
    agreed = {1: -1.0, 2: -2.0}, {1: -1.0, 2: -2.5}
    ours, theirs = answer(agreed[0], {5: -1.0, 6: -1.1}), answer(agreed[1], scores)
    found = compare("Q8_0", [ours, ours], [theirs, ours])
    assert (found.tokens, found.unexplained) == (3, unexplained)
    assert found.gaps == [pytest.approx(gap)]


def test_other_prompts_are_found():
    found = compare("F32", [answer({5: -1.0})], [answer({5: -1.0}, prompt=(3,))])
    assert not found.same_prompts
