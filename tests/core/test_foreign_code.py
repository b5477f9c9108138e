"""Exceptions that foreign code raises: those that are not Exceptions become one."""

from __future__ import annotations

import gevent
import pytest

from core.errors import RequestError, StoppedError
from core.foreign_code import EscapedError, contained
from tests.escaping import ESCAPING


@pytest.mark.parametrize("kind", ESCAPING)
def test_what_would_end_the_process_becomes_an_exception(kind: type[BaseException]) -> None:
    with pytest.raises(EscapedError, match=f"{kind.__name__}: why") as caught, contained:
        raise kind("why")
    assert isinstance(caught.value.error, kind)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a"),
        RequestError("field", "is wrong"),
        StopIteration(),
        KeyboardInterrupt(),
        StoppedError(),
        gevent.GreenletExit(),
    ],
)
def test_other_exceptions_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, contained:
        raise error
    assert caught.value is error


def test_the_context_may_be_nested() -> None:
    with pytest.raises(EscapedError), contained, contained:
        raise SystemExit
    with contained:
        pass
