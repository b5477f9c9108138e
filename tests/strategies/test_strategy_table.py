"""The strategy table is complete; load test and deployment know every name."""

from __future__ import annotations

import pytest

from core.configuration.batching import sequence_limit
from core.configuration.options import Options, make_options
from core.configuration.strategy_table import BATCHING_NAMES, LIBRARY_NAMES, STRATEGIES
from deploy.sagemaker.command_line import STRATEGIES as DEPLOYED
from loadtest.report.style import OURS as COLOURED
from tests.strategies.fakes import strategy_of


def test_every_strategy_has_a_row():
    assert tuple(STRATEGIES) == BATCHING_NAMES
    assert LIBRARY_NAMES == ("none", "dynamic")


@pytest.mark.parametrize("name", BATCHING_NAMES)
def test_every_strategy_has_a_module(name):
    assert type(strategy_of(name)).__module__ == f"strategies.{name}"


@pytest.mark.parametrize(
    ("name", "default", "limited"),
    [("none", 1, 1), ("dynamic", 32, 3), ("continuous", 256, 5), ("paged", 256, 5)],
)
def test_rows_limit_concurrent_sequences(name, default, limited):
    assert sequence_limit(Options().strategy, name) == default
    options = make_options({"batch_size": 3, "max_rolling_batch_size": 5})
    assert sequence_limit(options.strategy, name) == limited


def test_load_test_and_deployment_list_every_strategy():
    assert COLOURED == BATCHING_NAMES, "add a colour to loadtest/report/style.py"
    assert DEPLOYED == BATCHING_NAMES, "add the name to deploy/sagemaker/command_line.py"
