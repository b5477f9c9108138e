from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.loadtest.stub import Stub, serving


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving() as stub:
        yield stub
