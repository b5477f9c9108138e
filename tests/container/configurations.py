"""Resolves configurations from texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from container.configuration.resolve import Configuration, load_configuration
from core.errors import ConfigurationError

Load = Callable[..., Configuration]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Resolve a configuration file with this text under these environment variables."""

    def load(text: str, variables: Mapping[str, str] | None = None) -> Configuration:
        path = tmp_path / "serving.properties"
        path.write_text(text, "utf-8")
        return load_configuration(path, variables or {})

    return load


def refusal(load, text: str, variables: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(text, variables)
    return str(caught.value)
