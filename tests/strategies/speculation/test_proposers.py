"""Proposers against a search of the whole text."""

from __future__ import annotations

import random

import pytest

from core.sampling import SamplingParams
from core.sequence import Sequence
from strategies.speculation import ngram, suffix
from strategies.speculation.automaton import SuffixAutomaton
from strategies.speculation.ngram import NgramLookup
from strategies.speculation.proposer import NO_PROPOSAL
from strategies.speculation.suffix import SuffixProposer

LONG = random.Random(1).sample(range(1000), 50)


def texts(count=30):
    for seed in range(count):
        rng = random.Random(seed)
        yield [rng.randrange(rng.choice((2, 3, 9))) for _ in range(rng.randint(1, 60))]


def matches(text: list[int], end: int) -> int:
    """Return how many tokens before `end` equal the last ones of the text."""
    length = 0
    while length < end and text[end - 1 - length] == text[-1 - length]:
        length += 1
    return length


def copied(text: list[int], place: int, count: int) -> tuple[int, ...]:
    whole = [*text]
    for index in range(place, place + count):
        whole.append(whole[index])
    return tuple(whole[len(text) :])


def test_ngrams_copy_from_the_latest_of_the_longest_matches():
    for text in texts():
        lookup = NgramLookup(text)
        places = sorted(range(1, len(text)), key=lambda end: (matches(text, end), end))
        found = lookup.propose(6)
        if not places or matches(text, places[-1]) < 2:
            assert found.tokens == ()
        elif matches(text, places[-1]) < ngram.MOST_COMPARED:
            compared = [p for p in reversed(range(1, len(text))) if matches(text, p) >= 2]
            if len(compared) <= ngram.MOST_OCCURRENCES:
                assert found[:2] == (copied(text, places[-1], 6), matches(text, places[-1]))


def test_settings_of_vllm_change_what_is_proposed():
    text = [1, 2, 3, 4, 5, 9, 2, 3]
    assert NgramLookup(text).propose(3)[:2] == ((4, 5, 9), 2)
    assert NgramLookup(text, shortest=3).propose(3) == NO_PROPOSAL
    assert NgramLookup([1, 2, 3, 4, 9, 1, 2, 3], 2, 2).propose(1).match == 2
    lookup = SuffixProposer(per_match=1.5).begin(Sequence(0, text, SamplingParams()))
    assert lookup.propose(9)[:2] == ((4, 5, 9), 2)


@pytest.mark.parametrize("method", [NgramLookup, None])
def test_a_lookup_follows_a_text_that_grows(method):
    text = [*LONG]
    sequence = Sequence(0, text, SamplingParams(max_tokens=99))
    lookup = NgramLookup(sequence.token_ids) if method else SuffixProposer().begin(sequence)
    assert lookup.propose(3).tokens == ()
    sequence.token_ids += LONG[10:12]
    assert lookup.propose(3)[:2] == (tuple(LONG[12:15]), 2)
    sequence.token_ids += LONG[12:15]
    assert lookup.propose(3)[:2] == (tuple(LONG[15:18]), 5)


@pytest.mark.parametrize("module", [ngram, suffix])
def test_a_long_prompt_is_read_in_parts(monkeypatch, module):
    monkeypatch.setattr(module, "MOST_AT_ONCE", 30)
    sequence = Sequence(0, LONG + LONG[:5], SamplingParams(max_tokens=99))
    lookup = SuffixProposer().begin(sequence)
    if module is ngram:
        lookup = NgramLookup(sequence.token_ids)
    assert lookup.propose(2).tokens == ()
    assert lookup.propose(2)[:2] == (tuple(LONG[5:7]), 5)


def test_the_automaton_knows_the_longest_repeated_suffix():
    for text in texts():
        automaton = SuffixAutomaton()
        for token in text:
            automaton.append(token)
        state, length = automaton.repeated
        assert length == max((matches(text, end) for end in range(len(text))), default=0)
        if length:
            [follower] = automaton.follow(state, 1)
            ends = [end for end in range(len(text)) if matches(text, end) >= length]
            assert follower in {text[end] for end in ends}
        assert len(automaton) <= 2 * len(text) + 1


def test_the_automaton_finds_runs_of_another_text():
    for text, other in zip(texts(), reversed([*texts()]), strict=True):
        automaton = SuffixAutomaton()
        for token in text:
            automaton.append(token)
        place = 0, 0
        for end, token in enumerate(other, start=1):
            place = automaton.step(*place, token)
            runs = (other[end - n : end] for n in range(end, 0, -1))
            longest = next((len(run) for run in runs if occurs(run, text)), 0)
            assert place[1] == longest


def occurs(run: list[int], text: list[int]) -> bool:
    return any(text[at : at + len(run)] == run for at in range(len(text)))


def ended(proposer: SuffixProposer, answer: list[int], salt: str) -> None:
    sequence = Sequence(0, [1], SamplingParams(max_tokens=99, cache_salt=salt))
    lookup = proposer.begin(sequence)
    sequence.token_ids += answer
    lookup.end()


def test_answers_are_proposed_to_others_with_the_same_salt_only():
    proposer = SuffixProposer()
    ended(proposer, LONG, "a")
    ended(proposer, [7, 7, 7], "a")
    for salt, drafts in (("a", tuple(LONG[3:6])), ("b", ())):
        sequence = Sequence(1, LONG[:3], SamplingParams(max_tokens=99, cache_salt=salt))
        assert proposer.begin(sequence).propose(3).tokens == drafts


def test_nothing_is_proposed_across_the_end_of_an_answer():
    proposer = SuffixProposer()
    ended(proposer, LONG, "")
    ended(proposer, LONG[::-1], "")
    sequence = Sequence(1, LONG[-3:], SamplingParams(max_tokens=99))
    assert proposer.begin(sequence).propose(3).tokens == ()


def test_recent_answers_go_on_as_before_their_end():
    """The end of the recent answer, too, is a run that was seen before."""
    proposer = SuffixProposer()
    ended(proposer, [6, 7, 8, 6, 7], "")
    ended(proposer, [5, 5, 5, 5, 5], "")
    for tokens, expected in (([9, 6, 7], (8, 6, 7)), ([9, 5, 5, 5], (5, 5))):
        sequence = Sequence(1, tokens, SamplingParams(max_tokens=99))
        assert proposer.begin(sequence).propose(3).tokens == expected


def test_recent_answers_and_salts_are_bounded(monkeypatch):
    monkeypatch.setattr(suffix, "MOST_STATES", 10)
    monkeypatch.setattr(suffix, "MOST_SALTS", 3)
    proposer = SuffixProposer()
    for number in range(9):
        ended(proposer, LONG, str(number % 5))
    assert len(proposer._recent) == 3
    sequence = Sequence(1, LONG[:3], SamplingParams(max_tokens=99, cache_salt="3"))
    assert proposer.begin(sequence).propose(3).tokens == (), "the text begins anew"
