"""What `explain`, `serve --help` and the flags of the command line print and refuse."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from container.__main__ import main
from core.process import measured
from core.process.measured import Measured


def test_a_configuration_error_ends_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serving.properties"
    path.write_text("engin=Python\n")
    assert main(["serve", "--properties", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"longshore: {path}:1: unknown key 'engin'; did you mean 'engine'?\n"
    )


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert "--max-rolling-batch-prefill-tokens VALUE" in shown
    assert "longshore serve" not in shown, "the command is shown as it was started"
    assert "python -m container serve DIR --port 8081" in shown


@pytest.mark.parametrize("command", ["batch", "explain", "plan"])
def test_only_serve_has_a_port(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "--port" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "--port" in capsys.readouterr().out


def test_flags_beat_the_file_and_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "serving.properties").write_text("option.batching=none\nbatch_size=3\n")
    monkeypatch.setenv("OPTION_BATCHING", "dynamic")
    monkeypatch.setenv("OPTION_DTYPE", "fp32")
    command = ["explain", str(tmp_path), "--batching", "paged", "--dtype", "bf16"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  batching: paged (option.batching=paged)"
    assert any(re.fullmatch(r"  option.batching=paged +--batching", line) for line in lines)
    assert any(re.fullmatch(r"  option.dtype=bf16 +--dtype", line) for line in lines)
    assert any(line.endswith("serving.properties:2") for line in lines)
    assert main([*command, "--batch-size", "many"]) == 2
    assert "--batch-size: batch_size=many" in capsys.readouterr().err


def test_a_flag_alone_switches_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path), "--receipts", "--batching", "paged"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(re.fullmatch(r"  option.receipts=true +--receipts", line) for line in lines)
    assert main(["explain", "--receipts", str(tmp_path)]) == 2
    assert f"option.receipts={tmp_path}: expected true or false" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ({"batching": "continuous", "batch-size": "4"},
         "batch_size has no effect with continuous; its limit is option.max_rolling_batch_size"),
        ({"batching": "dynamic", "max-rolling-batch-size": "4"},
         "option.max_rolling_batch_size has no effect with dynamic; its limit is batch_size"),
        ({"batching": "none", "batch-size": "4"}, "batch_size has no effect with none"),
        ({"batching": "paged", "batch-size": "1", "max-rolling-batch-size": "4"}, None),
        ({"batch-size": "4"}, None),
    ],
)  # fmt: skip
def test_a_limit_that_the_strategy_does_not_read_gives_a_warning(
    capsys: pytest.CaptureFixture[str], flags: dict[str, str], warning: str | None
) -> None:
    arguments = [text for name, value in flags.items() for text in (f"--{name}", value)]
    assert main(["explain", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if line.startswith("  warning: ")]
    assert found == ([] if warning is None else [f"  warning: {warning}"])


def test_the_model_on_the_command_line_beats_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODEL_ID", "org/other")
    for model, shown in (
        ("org/name", "model: org/name (not a local directory)"),
        ("/no/such", "model: /no/such (no such directory)"),
        (str(tmp_path), f"model: {tmp_path} (no model: config.json is missing)"),
    ):
        assert main(["explain", model]) == 0
        assert shown in capsys.readouterr().out


def test_explain_names_the_model_and_missing_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serving.properties"
    path.write_text("option.model_id=models/one\n")
    assert main(["explain", "--properties", str(path)]) == 0
    assert "model: models/one (not a local directory)" in capsys.readouterr().out
    (tmp_path / "models" / "one").mkdir(parents=True)
    assert main(["explain", "--properties", str(path)]) == 0
    assert f"model: {tmp_path}/models/one (no model: config.json" in capsys.readouterr().out


def test_explain_shows_what_was_measured_at_an_earlier_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = ("rows  1  2", "ms  3.0  4.0")
    note = Measured(str(tmp_path), "it pays from 0.3 on", msgspec.Raw(b"{}"), table)
    measured.write("0", note)
    os.utime(measured.path_of("0"), (1e9, 1e9))
    measured.write("1", Measured(str(tmp_path.parent), "of another model", msgspec.Raw(b"{}")))
    for method in ("", "option.speculative_method=ngram\n"):
        (tmp_path / "serving.properties").write_text(f"option.model_id={tmp_path}\n{method}")
        (tmp_path / "config.json").write_text("{}")
        assert main(["explain", str(tmp_path)]) == 0
        output = capsys.readouterr().out
        pattern = (
            r"  measured on 2001-09-0[89] at \d\d:46 \S+: it pays from 0.3 on\n"
            r"    rows  1  2\n    ms  3.0  4.0\n    kept in \S+/0.json\n"
        )
        assert bool(re.search(pattern, output)) == bool(method)
        assert "of another model" not in output


def test_explain_rejects_what_serve_would_reject(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serving.properties"
    path.write_text("option.executor=library\noption.batching=paged\n")
    assert main(["explain", "--properties", str(path)]) == 2
    assert "it works with none and dynamic" in capsys.readouterr().err
