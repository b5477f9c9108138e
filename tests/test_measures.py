"""Limits of what a reader must know, so that a change makes nothing worse (tests/measures).

The goals are 12 files for each feature, and 75, 45 and 110 for the first three doors. Lower a limit
with the change that makes it possible.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.measures import tree
from tests.measures.smear import FEATURES
from tests.measures.trace import Function, Trace
from tests.measures.tree import ROOT, closure, files, imports

SMEAR = {
    "images": 12,
    "adapters": 8,
    "ranks": 12,
    "copies": 10,
    "prompt_logprobs": 11,
    "grammars": 10,
    "tasks": 11,
    "beams": 10,
}
"""Files outside a feature's home that name it, at most."""
CLOSURE = {
    "engine.step.packed_executor": 44,
    "container.apis.text.api": 44,
    "engine.offline.llm": 57,
    "engine.builders.packed": 109,
    "strategies.paged": 19,
}
"""Files that a door imports, at most."""
PLAIN_PATH = (
    "core.sequence", "core.plan", "core.request", "engine.engine", "engine.model.decoder",
    "engine.step.packed_executor", "engine.step.step_inputs", "engine.step.passes",
    "core.part", "core.output", "core.request_check", "engine.memory.capacity",
    "engine.serve.meter", "engine.serve.server",
    "container.apis.generation.generation", "container.apis.generation.generations",
    "container.apis.generation.reply", "container.apis.text.api",
    "container.apis.chat.response", "container.apis.completions.response",
    *(module for module in files() if module.startswith("strategies.")),
)  # fmt: skip
"""Modules that plain requests need."""


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_named_in_few_files(name: str) -> None:
    """`python -m tests.measures --feature NAME` lists the files."""
    assert len(FEATURES[name].named_in) <= SMEAR[name]


@pytest.mark.parametrize("name", FEATURES)
def test_the_home_of_a_feature_exists(name: str) -> None:
    assert [place for place in FEATURES[name].home if not (ROOT / place).exists()] == []


@pytest.mark.parametrize("door", CLOSURE)
def test_doors_import_few_files(door: str) -> None:
    """`python -m tests.measures --door NAME` lists the files."""
    assert len(closure(door)) <= CLOSURE[door]


def test_the_plain_path_imports_no_feature() -> None:
    """Nor for type checkers: whoever reads the path would have to know the feature."""
    found = {
        (module, other)
        for module in PLAIN_PATH
        for other in imports(module, everywhere=True)
        for feature in FEATURES.values()
        if feature.is_home(files()[other]) and not feature.is_home(files()[module])
    }
    assert found == set()


CODE = """
def sign(number):
    'Return -1 or 1.'
    if number < 0:
        return -1
    return 1


def unused():
    pass
"""


def test_a_trace_counts_what_ran_of_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sign.py"
    path.write_text(CODE)
    monkeypatch.setattr(tree, "ROOT", tmp_path)
    monkeypatch.setattr(tree, "files", lambda: {"sign": path})
    monkeypatch.syspath_prepend(tmp_path)
    trace = Trace()
    trace.install()
    sign = importlib.import_module("sign").sign
    trace.start()
    assert sign(3) == 1
    trace.stop()
    assert trace.functions() == [
        Function("sign.py:2", "sign", lines=5, statements=3, ran=2, depth=0)
    ]
