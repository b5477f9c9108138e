"""The uploaded files and the generated serving.properties."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from container.configuration.properties import read_properties
from deploy.sagemaker.errors import DeployError
from deploy.sagemaker.package import Package, make_package


def package(
    model_dir: Path | None = None,
    model_id: str | None = None,
    properties: Path | None = None,
    strategy: str | None = None,
) -> Package:
    return make_package(
        model_dir=model_dir, model_id=model_id, properties=properties, strategy=strategy
    )


def settings(made: Package, tmp_path: Path) -> dict[str, str]:
    """Return the properties as the container parses them."""
    path = tmp_path / "read.properties"
    path.write_bytes(made.blobs()["serving.properties"])
    return {setting.key: setting.text for setting in read_properties(path)}


def test_hidden_files_are_not_uploaded(model_dir: Path, tmp_path: Path) -> None:
    made = package(model_dir)
    assert set(made.blobs()) == {
        "config.json",
        "model.safetensors",
        "onnx/weights",
        "serving.properties",
    }
    assert settings(made, tmp_path) == {}
    assert made.num_bytes == 2 + 3000 + 1


def test_the_strategy_replaces_the_one_in_the_file(model_dir: Path, tmp_path: Path) -> None:
    own = "# mine: \u00fc\noption.batching = none\noption.chat_template=\u00fc.jinja\n"
    (model_dir / "serving.properties").write_text(own, "utf-8")
    assert settings(package(model_dir), tmp_path)["option.batching"] == "none"
    assert package(model_dir).properties == own
    changed = package(model_dir, strategy="paged")
    expected = {"option.batching": "paged", "option.chat_template": "\u00fc.jinja"}
    assert settings(changed, tmp_path) == expected
    assert changed.properties.startswith("# mine")
    other = tmp_path / "other.properties"
    other.write_text("batch_size=4")
    assert settings(package(model_dir, properties=other), tmp_path) == {"batch_size": "4"}


def test_a_hub_model_id_uploads_no_weights(tmp_path: Path) -> None:
    made = package(model_id="org/model", strategy="dynamic")
    assert list(made.blobs()) == ["serving.properties"]
    expected = {"option.model_id": "org/model", "option.batching": "dynamic"}
    assert settings(made, tmp_path) == expected


def test_the_digest_distinguishes_packages(model_dir: Path) -> None:
    first = package(model_dir).digest
    assert package(model_dir).digest == first
    assert package(model_dir, strategy="none").digest != first
    (model_dir / "onnx" / "weights").write_bytes(b"ww")
    assert package(model_dir).digest != first


def test_an_archive_has_the_files_at_its_root(model_dir: Path, tmp_path: Path) -> None:
    made, path, uploads = package(model_dir, strategy="paged"), tmp_path / "model.tar.gz", []
    made.write_archive(path, uploads.append)
    with tarfile.open(path) as archive:
        assert set(archive.getnames()) == set(made.blobs())
        assert archive.extractfile("serving.properties").read() == b"option.batching=paged\n"
    assert sum(uploads) == made.num_bytes


def test_invalid_packages(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="name exactly one model"):
        package()
    with pytest.raises(DeployError, match="name exactly one model"):
        package(model_dir, "org/model")
    with pytest.raises(DeployError, match=r"no model \(config.json is missing\)"):
        package(tmp_path / "nowhere")
    with pytest.raises(DeployError, match=r"none\.properties"):
        package(model_dir, properties=tmp_path / "none.properties")
    (model_dir / "serving.properties").write_text("option.model_id=other")
    with pytest.raises(DeployError, match="names a different model than --model-dir"):
        package(model_dir)
