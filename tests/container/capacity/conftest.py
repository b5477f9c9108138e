from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.container.capacity.planned import LLAMA_8B


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path
