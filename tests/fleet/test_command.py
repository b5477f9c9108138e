"""The command line without Ray: its errors come before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fleet.__main__ import main
from longshore.__main__ import main as longshore


@pytest.fixture
def properties(tmp_path: Path) -> Path:
    path = tmp_path / "serving.properties"
    path.write_text("option.batching=paged\n")
    return path


@pytest.mark.parametrize("scale", ["0:2", "3:2", "2", "a:b", "1:"])
def test_a_bad_range_is_explained(scale: str, properties: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--properties", str(properties), "--autoscale", scale]) == 2
    assert f"--autoscale {scale}: expected MIN:MAX, such as 1:4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [("option.batching=pagde", "option.batching"), ("option.ssl_certfile=a\noption.ssl_keyfile=b",
     "the nodes of a fleet speak HTTP")],
)  # fmt: skip
def test_bad_properties_are_explained_before_anything_starts(
    text: str, said: str, properties: Path, capsys: pytest.CaptureFixture[str]
):
    properties.write_text(text)
    assert main(["serve", "--properties", str(properties)]) == 2
    assert said in capsys.readouterr().err


def test_missing_properties_are_named(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--properties", "nowhere"]) == 2
    assert "--properties nowhere: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--replicas", "0"], ["--local-nodes", "-1"], ["--cpus", "0"], ["--surge", "101"],
     ["--router", "random"], ["--replicas", "2", "--autoscale", "1:2"],
     ["--address", "auto", "--local-nodes", "2"]],
)  # fmt: skip
def test_flags_are_checked(arguments: list[str], properties: Path):
    with pytest.raises(SystemExit) as exit:
        main(["serve", "--properties", str(properties), *arguments])
    assert exit.value.code == 2


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_command_says_what_to_install(
    properties: Path, capsys: pytest.CaptureFixture[str]
):
    assert longshore(["fleet", "serve", "--properties", str(properties)]) == 1
    assert "ray is not installed; run: pip install 'longshore[ray]'" in capsys.readouterr().err
