"""Later starts read a config that an earlier one has kept, and import no transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import msgspec
import pytest

from core.errors import ConfigurationError
from core.process.names import import_root
from engine import LLM, SamplingParams, build
from engine.loading.kept_config import read_kept
from kernels.cpu.shared_library import cache_directory
from tests.engine.tiny_models import OWN

START = """
import logging, sys
from core.process.logs import configure_logs
from engine import LLM

configure_logs("json", "INFO")
LLM("models/demo", dtype="fp32")
is_imported = "transformers" in sys.modules
import transformers
transformers.logging.get_logger("transformers.models").error("a line")
sys.exit(is_imported)
"""
REREAD = {
    "apertus", "bamba", "deepseek_v2", "deepseek_v3", "falcon_h1", "gemma4_text",
    "gemma4_unified_text", "gpt_oss", "granitemoehybrid", "ministral3", "mistral4",
}  # fmt: skip
"""Families whose tiny models have a rotation that transformers computes, layers with settings of
their own, or a setting that JSON cannot hold."""


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Where configs are kept: nothing yet."""
    folder = tmp_path / "kept"
    monkeypatch.setattr("core.process.measured.folder", lambda: folder)
    return folder


@pytest.fixture
def started(monkeypatch):
    """Return a function that starts an engine, and says how many configs transformers read."""
    read_config, read = build.read_config, []

    def watch(*arguments):
        read.append(arguments)
        return read_config(*arguments)

    def start(folder, **options):
        read.clear()
        llm = LLM(folder, **({"dtype": "fp32"} | options))
        return llm, len(read)

    monkeypatch.setattr(build, "read_config", watch)
    return start


@pytest.fixture
def llama(tiny_model, tmp_path):
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "llama"))


def test_a_later_start_imports_no_transformers(tmp_path):
    """What the library logs at a first start has the form of this process's log."""

    def start():
        places = {"XDG_CACHE_HOME": str(tmp_path), "LONGSHORE_CACHE": str(cache_directory())}
        command = [sys.executable, "-c", START]
        result = subprocess.run(
            command, cwd=import_root(), env=os.environ | places, capture_output=True, text=True
        )
        lines = [line for line in result.stderr.splitlines() if "a line" in line]
        return result.returncode, [line.startswith('{"time":') for line in lines]

    assert start() == (1, [True])
    assert start()[0] == 0


@pytest.mark.matrix(cases=12)
@pytest.mark.parametrize("architecture", OWN)
def test_a_kept_config_has_all_that_our_decoders_read(tiny_model, kept, started, architecture):
    folder, greedy = tiny_model(architecture), SamplingParams(temperature=0, max_tokens=8)
    (first, num_read), (later, num_reread) = started(folder), started(folder)
    assert (num_read, num_reread) == (1, architecture in REREAD)
    prompts = [[5, 9, 2], list(range(1, 40))]
    answers = [
        [answer.outputs[0].token_ids for answer in llm.generate(prompts, greedy, use_tqdm=False)]
        for llm in (first, later)
    ]
    assert answers[0] == answers[1]
    facts = [
        msgspec.structs.replace(llm.facts, load_seconds=0, phases={}) for llm in (first, later)
    ]
    assert facts[0] == facts[1]


@pytest.mark.parametrize(
    ("options", "num_read"),
    [
        ({}, 0),
        ({"dtype": "bf16"}, 0),
        ({"quantize": "int8"}, 1),
        ({"load_format": "dummy"}, 1),
        ({"trust_remote_code": True}, 1),
        ({"decoder": "transformers"}, 1),
        ({"executor": "library", "batching": "none"}, 1),
    ],
)
def test_what_needs_transformers_reads_the_config_again(llama, kept, started, options, num_read):
    assert started(llama)[1] == 1
    files = {*kept.iterdir()}
    assert [started(llama, **options)[1] for _ in range(2)] == [num_read] * 2
    assert {*kept.glob("*.config")} <= files
    as_json = build.read_config(llama, False).to_json_string()
    assert read_kept(llama).to_json_string() == as_json


def test_a_clone_that_is_not_installed_starts(llama, kept, started, monkeypatch):
    """GPU_PYTHON=python3 runs `make gpu` so."""
    from_name = Distribution.from_name

    def missing(name):
        if name == "longshore":
            raise PackageNotFoundError(name)
        return from_name(name)

    monkeypatch.setattr(Distribution, "from_name", missing)
    assert [started(llama)[1] for _ in range(2)] == [1, 0]
    assert started(llama, load_format="dummy")[1] == 1


def test_another_config_or_other_weights_are_read_again(llama, kept, started):
    path = llama / "config.json"
    assert [started(llama)[1] for _ in range(2)] == [1, 0]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2}))
    with pytest.raises(ConfigurationError, match="belongs to no layer"):
        started(llama)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}, indent=1))
    assert [started(llama)[1] for _ in range(2)] == [1, 0]
    for logits in kept.glob("*.logits"):
        logits.unlink()
    assert [started(llama)[1] for _ in range(2)] == [1, 0]
    path.write_text("{")
    with pytest.raises(ConfigurationError, match=r"cannot read .*config\.json"):
        started(llama)


def test_a_config_that_json_cannot_hold_is_not_kept(llama, kept, started, monkeypatch):
    read_config = build.read_config

    def read(*arguments):
        config = read_config(*arguments)
        config.window = (1, 2)
        return config

    monkeypatch.setattr(build, "read_config", read)
    assert [started(llama)[1] for _ in range(2)] == [1, 1]
    assert not [*kept.glob("*.config")]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_generation_config_is_named(llama, text):
    (llama / "generation_config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"generation_config\.json cannot be read"):
        LLM(llama, dtype="fp32")
