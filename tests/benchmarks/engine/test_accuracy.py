"""The accuracy benchmark: nats per byte of a text, unquantized and with fp8, int8 and int4."""

from __future__ import annotations

import re

from benchmarks.engine.accuracy import cut, main
from tests.e2e.serving import DEMO

TEXT = "ROMEO:\nI'll not be a bawd, and I'll go with thee.\n\nJULIET:\nO, what a night is this!\n\n"


def test_all_windows_have_the_same_length():
    assert cut(list(range(11)), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_every_precision_is_scored(tmp_path, capsys):
    """Quantization changes the likelihood of the text a little, and the best token in places."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 12)
    assert main([str(DEMO), "--text", str(path), "--share", "0.5", "--window", "64"]) == 0
    printed = capsys.readouterr().out
    assert "windows of 64 tokens" in printed
    rows = re.findall(r"^\| (\w+) \| [\d.]+ \| ([\d.]+) \| (\S+)% \| ([\d.]+)% \|$", printed, re.M)
    assert [row[0] for row in rows] == ["none", "fp8", "int8", "int4"]
    assert rows[0][2:] == ("+0.00", "100.0")
    worse = {name: abs(float(percent)) for name, _, percent, _ in rows}
    assert worse["int8"] < 1
    assert worse["int4"] < 5
    assert float(rows[2][3]) > float(rows[3][3]), "int8 agrees with none more often than int4"
    assert float(rows[3][3]) < 100
