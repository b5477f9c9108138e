"""Models are told apart by some of their bytes."""

from __future__ import annotations

import os
import shutil

import pytest

from core.configuration.options import make_options
from engine.build import build_engine
from engine.digest import digest_model
from engine.resolve import with_digest

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


def digest(engine, **options):
    given = make_options(options)
    return with_digest(engine.facts, given.model, given.memory).digest.split(".")


def test_the_digest_of_an_engine_names_what_may_change_bits(tiny_model, monkeypatch):
    folder = tiny_model("llama")
    first = digest(build_engine(folder, make_options({"dtype": "fp32"})))
    int8 = digest(build_engine(folder, make_options({"dtype": "fp32", "quantize": "int8"})))
    assert first[1:4] == ["plain", "float32", "float32"]
    assert first[6:] == ["1"]
    assert int8 == [first[0], "int8", *first[2:]]
    engine = build_engine(folder, make_options({"dtype": "bf16", "load_format": "dummy"}))
    assert digest(engine, load_format="dummy") == [
        f"random{first[0]}", "plain", "bfloat16", "bfloat16", *first[4:]
    ]  # fmt: skip
    monkeypatch.setattr("engine.resolve.version", lambda name: "another")
    assert [a == b for a, b in zip(first, digest(engine), strict=True)].index(False, 4) == 5
