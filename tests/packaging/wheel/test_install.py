"""make's installer reports in one line what pip did, and shows all its output if pip fails."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

import pytest

from tests.packaging.scripts import load

_script = load("wheel/install.py")
install, stage = _script.install, _script.stage


METADATA = "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with a wheel of three million bytes."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "#" * 3_000_000)
        wheel.writestr("tiny-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("tiny-1.0.dist-info/WHEEL", WHEEL)
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return folder


def arguments(wheels: Path, site: Path, package: str) -> list[str]:
    source = ["--no-index", "--find-links", str(wheels)]
    return [*source, "--no-compile", "--target", str(site), package]


def test_one_line_says_what_was_installed(wheels: Path, tmp_path: Path) -> None:
    site, out = tmp_path / "site", io.StringIO()
    assert install(arguments(wheels, site, "tiny"), site, out) == 0
    assert (site / "tiny.py").exists()
    assert re.fullmatch(r"installed 1 package, 3 MiB, in \d+ s\n", out.getvalue())


def test_a_terminal_shows_what_is_going_on(wheels: Path, tmp_path: Path) -> None:
    site, out = tmp_path / "site", Terminal()
    assert install(arguments(wheels, site, "tiny"), site, out) == 0
    *shown, last = out.getvalue().split("\r\x1b[K")
    assert re.fullmatch(r"\d+ s: .+", shown[1])
    assert last.startswith("installed 1 package")
    lines = ["Collecting torch\n", "  Downloading torch.whl (190.2 MB)\n", "Requirement already\n"]
    assert stage(lines) == "Downloading torch.whl (190.2 MB)"
    assert stage([*lines, "Installing collected packages: a, b\n"]).endswith("packages")


def test_if_pip_fails_all_its_output_is_shown(
    wheels: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = io.StringIO()
    assert install(arguments(wheels, tmp_path, "tinier"), tmp_path, out) == 1
    assert "No matching distribution found for tinier" in capfd.readouterr().err
    assert "Looking in links" in out.getvalue(), "pip's output before the error is shown, too"
    assert "installed" not in out.getvalue()
