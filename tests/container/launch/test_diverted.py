"""Streams whose tokens the reader of the engine's messages writes, and not their greenlet."""

from __future__ import annotations

from collections.abc import Iterator

import gevent
import pytest

from container.wire.token_stream import TokenStream
from core.output import Output
from core.sampling import Finish


def output(token_id: int, finish: Finish | None = None, index: int = 0) -> Output:
    return Output(0, (token_id,), (-0.5,), finish, index)


class Waiting:
    """A stream with a greenlet that waits in `get`."""

    def __init__(self, num_answers: int = 1) -> None:
        self.stream = TokenStream("a", num_answers, lambda id, index, reason: None)
        self.got: list[tuple[int, ...]] = []
        self.error: Exception | None = None
        self._greenlet = gevent.spawn(self._run)
        gevent.sleep(0)

    def _run(self) -> None:
        try:
            while not self.stream.has_ended:
                self.got += [each.token_ids for each in self.stream.get(60)]
        except RuntimeError as error:
            self.error = error

    def step(self, *outputs: Output) -> None:
        """Let outputs arrive as one step, and the greenlet run if it wakes up."""
        for each in outputs:
            self.stream.push(each)
        self.stream.deliver()
        gevent.sleep(0.01)

    def close(self) -> None:
        self._greenlet.kill()


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    waiting = Waiting()
    yield waiting
    waiting.close()


def test_tokens_go_past_the_greenlet_and_the_last_one_to_it(waiting: Waiting) -> None:
    waiting.step(output(1))
    taken: list[tuple[int, ...]] = []

    def take(output: Output) -> bool:
        taken.append(output.token_ids)
        return True

    waiting.stream.divert(take)
    waiting.step(output(2))
    waiting.step(output(3), output(4))
    assert (waiting.got, taken) == ([(1,)], [(2,), (3, 4)]), "what waits is given at once"
    waiting.step(output(5), output(6, Finish.EOS))
    assert (waiting.got, taken) == ([(1,), (5, 6)], [(2,), (3, 4)])


def test_after_a_refusal_the_greenlet_gets_what_follows(waiting: Waiting) -> None:
    taken: list[int] = []

    def take(output: Output) -> bool:
        taken.append(output.token_ids[0])
        return False

    waiting.stream.divert(take)
    waiting.step(output(1))
    waiting.step(output(2))
    waiting.step(output(3, Finish.EOS))
    assert (taken, waiting.got) == ([1], [(2,), (3,)])


def test_no_token_is_lost_if_one_of_several_answers_is_refused() -> None:
    waiting = Waiting(num_answers=2)
    taken: list[int] = []

    def take(output: Output) -> bool:
        taken.append(output.token_ids[0])
        return False

    waiting.stream.divert(take)
    waiting.step(output(1), output(2, index=1))
    assert (taken, waiting.got) == ([1], [(2,)])
    waiting.close()


def test_tokens_wait_for_a_greenlet_that_does_not_wait_for_them() -> None:
    stream = TokenStream("a", 1, lambda id, index, reason: None)
    stream.divert(lambda output: pytest.fail("the greenlet is busy with earlier tokens"))
    stream.push(output(1))
    stream.deliver()
    assert [each.token_ids for each in stream.get(60)] == [(1,)]


def test_the_greenlet_gets_the_error_of_a_token_that_cannot_be_written(waiting: Waiting) -> None:
    def take(output: Output) -> bool:
        raise RuntimeError("cannot be written")

    waiting.stream.divert(take)
    waiting.step(output(1))
    assert str(waiting.error) == "cannot be written"
