"""Routers: which server gets a request, what they remember, and the keys of prefixes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.routing import (
    CHUNK_CHARACTERS,
    CHUNK_TOKENS,
    MAX_PREFIXES_PER_PROMPT,
    ROUTERS,
    LeastLoaded,
    PrefixAware,
    RoundRobin,
    RoutedRequest,
    prefix_keys,
)

ANY = RoutedRequest(None, ())


def named(*loads):
    """Return the loads of servers that are named a, b, c and so on."""
    return dict(zip("abcdef", loads, strict=False))


def with_prefixes(*prefixes):
    return RoutedRequest(None, prefixes)


def of_session(session):
    return RoutedRequest(session, ())


def test_round_robin_takes_the_servers_in_turn():
    turns = RoundRobin()
    assert [turns.choose(ANY, named(9, 0, 0)) for _ in range(4)] == ["a", "b", "c", "a"]
    assert [turns.choose(ANY, named(9, 0)) for _ in range(3)] == ["a", "b", "a"]


def test_least_loaded_takes_the_first_of_the_least_loaded():
    assert LeastLoaded().choose(ANY, named(2, 1, 1)) == "b"


def test_a_known_prefix_goes_where_it_was_seen_unless_that_is_overloaded():
    """A server may have 1.25 times the mean load, rounded up.

    The new request counts in the server's load and in the mean.
    """
    router = PrefixAware()
    one, two = with_prefixes(1), with_prefixes(2)
    assert router.choose(one, named(3, 2, 3)) == "b"  # a new prefix goes to the least loaded
    assert router.choose(one, named(2, 4, 3)) == "b"  # 4 + 1 <= 1.25 x (9 + 1) / 3, rounded up
    assert router.choose(two, named(2, 3, 3)) == "a"
    assert router.choose(one, named(1, 5, 3)) == "a"  # 5 + 1 > 1.25 x (9 + 1) / 3, rounded up
    assert router.choose(one, named(4, 4, 3)) == "a"  # only a and b have seen it


def test_a_prefix_stays_where_at_most_one_request_runs():
    router = PrefixAware()
    assert router.choose(with_prefixes(1), named(1, 0)) == "b"
    assert router.choose(with_prefixes(1), named(0, 0)) == "b"
    assert router.choose(with_prefixes(1), named(0, 1)) == "b"
    assert router.choose(with_prefixes(1), named(0, 2)) == "a"


def test_the_longest_known_prefix_decides():
    router = PrefixAware()
    assert router.choose(with_prefixes("system"), named(0, 0, 9)) == "a"
    assert router.choose(with_prefixes("system", "question"), named(9, 0, 9)) == "b"
    assert router.choose(with_prefixes("system", "question", "new"), named(0, 1, 9)) == "b"
    assert router.choose(with_prefixes("system", "other"), named(4, 4, 3)) == "a"
    # b, which has seen the longer prefix, is overloaded. The shorter prefix leads to a.
    assert router.choose(with_prefixes("system", "question"), named(1, 9, 0)) == "a"


def test_a_session_stays_even_where_the_load_is_high():
    router = PrefixAware()
    assert router.choose(of_session("s"), named(1, 0)) == "b"
    assert router.choose(of_session("s"), named(0, 50)) == "b"
    assert router.choose(of_session("t"), named(0, 50)) == "a"


def test_a_session_moves_when_its_server_is_gone():
    router = PrefixAware()
    assert router.choose(of_session("s"), {"a": 1, "b": 0}) == "b"
    assert router.choose(of_session("s"), {"a": 1, "c": 0}) == "c"
    assert router.choose(of_session("s"), {"a": 0, "b": 0, "c": 5}) == "c"


def test_a_prefix_seen_only_by_a_server_that_is_gone_counts_as_new():
    router = PrefixAware()
    assert router.choose(with_prefixes(1), {"a": 1, "b": 0}) == "b"
    assert router.choose(with_prefixes(1), {"a": 1, "c": 0}) == "c"


def test_the_least_recently_used_is_forgotten_first():
    router = PrefixAware(max_remembered=2)
    for session in ("s", "t", "s", "u"):  # forgets t
        router.choose(of_session(session), named(1, 0))
    assert [router.choose(of_session(name), named(0, 1)) for name in "stu"] == ["b", "a", "a"]


def test_a_short_prefix_is_remembered_longer_than_a_long_one():
    router = PrefixAware(max_remembered=1)
    router.choose(with_prefixes("short", "long"), named(5, 4))
    assert router.choose(with_prefixes("short"), named(4, 4)) == "b"


@pytest.mark.parametrize("name", ROUTERS)
def test_any_router_takes_the_only_server(name):
    router = ROUTERS[name]()
    assert router.choose(RoutedRequest("s", (1, 2)), {"only": 7}) == "only"


@pytest.mark.parametrize(
    ("prompt", "chunk"),
    [("word " * 1000, CHUNK_CHARACTERS), (list(range(1000)), CHUNK_TOKENS)],
    ids=["text", "tokens"],
)
def test_prompts_share_the_keys_of_the_chunks_they_begin_with(prompt, chunk):
    keys = prefix_keys(prompt)
    assert len(keys) == len(set(keys)) == len(prompt) // chunk
    assert prefix_keys(prompt[: 2 * chunk]) == keys[:2]
    assert prefix_keys(prompt[: 2 * chunk - 1]) == keys[:1]
    assert prefix_keys(prompt[: chunk - 1]) == ()
    changed = prefix_keys(prompt[:chunk] + prompt[:1] + prompt[chunk:])
    assert changed[0] == keys[0]
    assert not set(changed[1:]) & set(keys)


def test_keys_of_one_prompt_differ_by_scope():
    prompt = "x" * CHUNK_CHARACTERS
    assert prefix_keys(prompt, "adapter") != prefix_keys(prompt)


def test_a_very_long_prompt_has_a_limited_number_of_keys():
    assert len(prefix_keys("x" * 10_000_000)) == MAX_PREFIXES_PER_PROMPT


def test_tokens_of_any_size_and_lone_surrogates_have_keys():
    assert len(prefix_keys([2**70, -1] * CHUNK_TOKENS)) == 2
    assert len(prefix_keys("\ud800" * CHUNK_CHARACTERS)) == 1


def test_keys_are_the_same_in_every_process():
    code = "from core.routing import prefix_keys; print(prefix_keys('x' * 1024))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(prefix_keys("x" * 1024))
