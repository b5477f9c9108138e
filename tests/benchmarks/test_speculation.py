"""The benchmark of speculation runs, and its given acceptance is what drafts get."""

from __future__ import annotations

import json

from benchmarks.speculation import main
from kernels.cpu.shared_library import unavailable_reason


def test_gains_of_the_demo_model(tmp_path, capsys):
    out, picture = tmp_path / "gains.json", tmp_path / "gains.svg"
    arguments = ["--users", "1", "--given", "0.5,1", "--tokens", "30", "--rounds", "1"]
    assert main([*arguments, "--dtype", "fp32", "--out", str(out)]) == 0
    assert "given 0.5    1 users:" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["command"].startswith("python -m benchmarks.speculation --users 1 --given 0.5,1")
    assert main(["--results", str(out), "--draw", str(picture)]) == 0
    assert capsys.readouterr().out == ""
    drawn = picture.read_text()
    assert drawn.startswith("<svg")
    for text in ("1 user", "decodes only", "6 rows a sequence", "ms"):
        assert f">{text}<" in drawn
    half, whole, repeats, plain = found["gains"]
    assert [half["what"], whole["what"]] == ["given 0.5", "given 1.0"]
    assert (repeats["what"], plain["what"]) == ("repeats", "plain")
    assert half["accepted"] < whole["accepted"]
    if unavailable_reason() is None:
        assert whole["accepted"] == 1.0
        assert whole["ideal"] > half["ideal"] >= 1.0
