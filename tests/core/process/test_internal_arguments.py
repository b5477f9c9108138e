"""Messages of internal processes to a user who starts one directly or with wrong arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.process.internal_arguments import internal_arguments
from tests.container.processes import ROOT

MODULES = {
    "container.apis.generation.formatters": "`longshore serve` starts it.",
    "container.batch.serve_batch": "`longshore batch` starts it.",
    "container.front_end.start": "`longshore serve` starts it.",
    "container.hooks.load": "`longshore serve` starts it.",
    "container.isolation.process": "An HTTP worker starts it.",
    "container.multi_model.serve_model": "The process that has the port starts it.",
    "engine": "`longshore serve` starts it.",
    "engine.follow": "Rank 0 or a fleet starts it.",
    "engine.vision.reader": "An HTTP worker starts it.",
    "deploy.fleet.node_process": "A fleet's actors on that node start it.",
}
"""Each module, with its sentence about who starts it."""
FORMS = ("join PARENT:int SHARE:float", "--from ADDRESS", "add SIZE:int PATH...")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def explains(text: str, module: str) -> bool:
    *usage, description = text.splitlines()
    return (
        usage[0].startswith(f"usage: python -m {module} ")
        and MODULES[module] in description
        and description.endswith("This is not a command for users, who run `longshore`.")
    )


@pytest.mark.parametrize("module", MODULES)
def test_help_says_what_the_process_is_and_who_starts_it(module: str) -> None:
    done = run("-m", module, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert explains(done.stdout, module)


@pytest.mark.parametrize("arguments", [(), ("first",)])
@pytest.mark.parametrize("module", MODULES)
def test_wrong_arguments_are_explained(module: str, arguments: tuple[str, ...]) -> None:
    done = run("-m", module, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert explains(done.stderr, module)


def test_arguments_are_checked_before_torch_is_imported() -> None:
    lines = f"import sys, {', '.join(MODULES)}; print('torch' in sys.modules)"
    assert run("-c", lines).stdout == "False\n"


@pytest.mark.parametrize(
    "given",
    [
        ["join", "1", "0.5"],
        ["join", "-1", "0"],
        ["--from", "--help"],
        ["--from", ""],
        ["add", "1", "a"],
        ["add", "1", "a", "b", "c"],
    ],
)
def test_arguments_that_fit_a_form_are_returned(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *given])
    assert internal_arguments("engine", "The engine.", *FORMS) == given


@pytest.mark.parametrize(
    "given",
    [
        ["join"],
        ["join", "1.5", "0"],
        ["join", "1", "half"],
        ["leave", "1", "0"],
        ["--from"],
        ["add", "1"],
        ["add", "a", "b"],
    ],
)
def test_arguments_that_fit_no_form_end_the_process(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *given])
    with pytest.raises(SystemExit) as raised:
        internal_arguments("engine", "The engine.", *FORMS)
    assert raised.value.code == 2
