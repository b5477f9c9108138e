"""The option table and the strategy that options select."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import msgspec
import pytest

from core.configuration.batching import choose_batching
from core.configuration.options import Options, make_options, option_table
from core.configuration.step_size import DEFAULT_PROMPT_SIZES
from core.errors import ConfigurationError

ROOT = Path(__file__).parents[3]


def test_every_option_is_documented_and_its_default_is_valid():
    for option in option_table().values():
        assert option.doc.endswith("."), option.name
        option.check(option.default)
    records = [getattr(Options(), record.name) for record in dataclasses.fields(Options)]
    fields = [field.name for record in records for field in dataclasses.fields(record)]
    assert fields == list(option_table()), "every option is in one record"


def test_every_option_is_read():
    packages = ("core", "engine", "container", "deploy/fleet")
    files = {path for name in packages for path in (ROOT / name).rglob("*.py")}
    code = "".join(path.read_text() for path in files - {ROOT / "core" / "options.py"})
    unread = [name for name in option_table() if not re.search(rf"\.{name}\b", code)]
    assert unread == [], "these options would be accepted and ignored"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("batching", "paged", "paged"),
        ("batch_size", " 8 ", 8),
        ("trust_remote_code", "True", True),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("max_model_len", "", None),
        ("model_id", "some/model", "some/model"),
    ],
)
def test_values_are_parsed(name, text, value):
    assert option_table()[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("batch_size", "many", "batch_size=many: expected an integer"),
        ("trust_remote_code", "yes", "option.trust_remote_code=yes: expected true or false"),
        ("gpu_memory_utilization", "x", "expected a number"),
        ("max_batch_delay", "", "expected an integer"),
    ],
)
def test_parse_errors_name_key_and_type(name, text, message):
    with pytest.raises(ConfigurationError, match=message):
        option_table()[name].parse(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batching": "pagd"}, "did you mean 'paged'"),
        ({"batch_size": 0}, "must be at least 1"),
        ({"gpu_memory_utilization": 1.5}, "must be at most 1"),
        ({"batch_size": True}, "expected an integer"),
        ({"max_rolling_batchsize": 3}, "did you mean 'max_rolling_batch_size'"),
    ],
)
def test_invalid_values_are_rejected(values, message):
    with pytest.raises(ConfigurationError, match=message):
        make_options(values)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (None, DEFAULT_PROMPT_SIZES),
        ("64, 128,256", (64, 128, 256)),
        ("7", (7,)),
        ("0", ()),
    ],
)
def test_cuda_graph_sizes_are_read(text, sizes):
    assert make_options({"cuda_graph_sizes": text}).execution.graph_prompt_sizes == sizes


@pytest.mark.parametrize("text", ["", "64,", "128,64", "64,64", "0,64", "-4", "many", "1.5"])
def test_cuda_graph_sizes_must_be_ascending_integers(text):
    with pytest.raises(ConfigurationError, match=r"option.cuda_graph_sizes=.*ascending order"):
        make_options({"cuda_graph_sizes": text})


def test_options_round_trip_through_json():
    options = make_options({"batching": "none", "max_model_len": 12, "trust_remote_code": True})
    assert msgspec.json.decode(msgspec.json.encode(options), type=Options) == options


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"batching": "none", "rolling_batch": "auto"}, "none"),
        ({"batch_size": 64, "max_batch_delay": 1000}, "dynamic"),
        ({"batch_size": 64, "rolling_batch": "auto"}, "dynamic"),
        ({"rolling_batch": "auto", "paged_attention": False}, "continuous"),
        ({"rolling_batch": "auto", "paged_attention": True}, "paged"),
        ({"rolling_batch": "lmi-dist"}, "paged"),
        ({"rolling_batch": "vllm"}, "paged"),
        ({"rolling_batch": "scheduler"}, "continuous"),
        ({"rolling_batch": "disable"}, "none"),
        ({"rolling_batch": "disable", "batch_size": 1}, "none"),
        ({"paged_attention": False}, "continuous"),
        ({"paged_attention": True}, "paged"),
        ({}, None),
    ],
)
def test_lmi_keys_select_the_batching(values, name):
    choice = choose_batching(make_options(values).strategy)
    assert choice.name == name
    assert choice.reason
