"""The command `longshore`."""

from __future__ import annotations

import sys

import pytest

from longshore import __main__ as command
from longshore.__main__ import COMMANDS, Command, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_examples(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The help works even if no extra is installed."""
    for module in [*sys.modules]:  # modules imported by other tests may hold an extra's packages
        if module.partition(".")[0] in ("deploy", "loadtest"):
            monkeypatch.delitem(sys.modules, module)
    for module in ("locust", "psutil", "boto3", "botocore", "ray", "vl_convert"):
        monkeypatch.setitem(sys.modules, module, None)
    arguments = ["load", "sweep"] if name == "load" else [name]
    with pytest.raises(SystemExit) as exit:
        main([*arguments, "--help"])
    assert exit.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: longshore {' '.join(arguments)} ")
    assert f"  longshore {name}" in shown.partition("examples:")[2]


@pytest.mark.parametrize(
    ("arguments", "said"), [([], "usage:"), (["srve"], "no command 'srve'; did you mean 'serve'?")]
)
def test_no_command_and_an_unknown_command_are_errors(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def run(arguments: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'locust'", name="locust")

    monkeypatch.setitem(command.COMMANDS, "compare", Command("", run, "loadtest"))
    assert main(["compare"]) == 1
    assert "locust is not installed; run: pip install 'longshore[loadtest]'" in (
        capsys.readouterr().err
    )
