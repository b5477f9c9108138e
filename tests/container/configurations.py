"""A helper of tests in which a configuration is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from container.configuration.resolve import Configuration
from core.errors import ConfigurationError

Load = Callable[..., Configuration]
"""The type of the fixture `load`, which resolves a configuration from the text of a
serving.properties file and environment variables."""


def refusal(load: Load, text: str, variables: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(text, variables)
    return str(caught.value)
