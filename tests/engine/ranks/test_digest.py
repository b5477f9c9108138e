"""Models are told apart by some of their bytes."""

from __future__ import annotations

import os
import shutil

import pytest

from engine.ranks.digest import digest_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path):
    """A model whose weights are too large to be read whole."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    header = b"{}" + b" " * 254
    weights = (256).to_bytes(8, "little") + header + os.urandom(2**22)
    (path / WEIGHTS).write_bytes(weights)
    return path


def test_a_copy_is_the_same_model(model, tmp_path):
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "link").symlink_to("copy")
    (tmp_path / "copy" / "tokenizer.json").write_text("{}")  # only rank 0 uses this file
    assert digest_model(tmp_path / "link") == digest_model(model)


def overwrite(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "config.json").write_text("{ }"),
        lambda model: (model / WEIGHTS).rename(model / "other.safetensors"),
        lambda model: os.truncate(model / WEIGHTS, 2**22),
        lambda model: overwrite(model / WEIGHTS, 100, b"+"),  # in the header
        lambda model: overwrite(model / WEIGHTS, 2**21, b"+" * 2**17),  # a matrix
        lambda model: (model / WEIGHTS).unlink(),
    ],
)
def test_another_model_is_told_apart(model, change):
    before = digest_model(model)
    change(model)
    assert digest_model(model) != before
