"""Configurations that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from container.configuration.resolve import Configuration
from core.errors import ConfigurationError

Load = Callable[..., Configuration]
"""The type of the fixture `load`, which configures from a file's text and variables."""


def refusal(load: Load, text: str, variables: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(text, variables)
    return str(caught.value)
