"""Model stores: directories with several models, and the commands that serve them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from container.__main__ import main
from container.configuration.resolve import load_configuration
from container.multi_model.serve_model import with_gpu_share_of_others
from container.multi_model.store import store_entries
from core.errors import ConfigurationError

Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return a function that creates empty files in a store and returns the store's path."""

    def make(*files: str) -> Path:
        for name in files:
            path = tmp_path / "store" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        return tmp_path / "store"

    return make


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Path] | Path]:
    """Record what the command line would serve: several models, or one directory."""
    seen: list[Any] = []

    def several(
        models: Mapping[str, Path], port: int, variables: Mapping[str, str], host: str
    ) -> int:
        seen.append(models)
        return 0

    def one(configuration: object, model_dir: Path, port: int, host: str) -> int:
        seen.append(model_dir)
        return 0

    monkeypatch.setattr("container.multi_model.server.serve_models", several)
    monkeypatch.setattr("container.__main__.serve_model", one)
    return seen


def test_every_entry_is_a_model(tree: Tree, served: list[Any]) -> None:
    store = tree("a/config.json", "b/serving.properties", "c/only/model.py", "d.tar.gz", "e.zip")
    paths = {name: store / name for name in ("a", "b", "c", "d.tar.gz", "e.zip")}
    assert store_entries(store) == {Path(name).name.split(".")[0]: p for name, p in paths.items()}
    assert main(["serve", "--model-dir", str(store)]) == 0
    assert served == [store_entries(store)]


@pytest.mark.parametrize(
    "files",
    [
        ("a/config.json", "b/config.json", "README.md"),
        ("a/config.json", "b/config.json", ".hidden"),
        ("code/model.py",),
        ("code/notes.txt", "weights/model.bin"),
        ("config.json",),
    ],
)
def test_other_directories_are_served_as_one_model(
    tree: Tree, served: list[Any], files: tuple[str, ...]
) -> None:
    store = tree(*files)
    assert store_entries(store) == {}
    assert main(["serve", "--model-dir", str(store)]) == 0
    assert served == [store / "code" if files == ("code/model.py",) else store]


def test_a_directory_without_a_model_among_models(tree: Tree) -> None:
    store = tree("a/config.json", "code/notes.txt", ".cache/x")
    with pytest.raises(ConfigurationError, match=r"but \.cache, code holds no model"):
        store_entries(store)


def test_duplicate_model_names(tree: Tree) -> None:
    with pytest.raises(ConfigurationError, match="two models with the same name"):
        store_entries(tree("a/config.json", "a.zip"))


def test_missing_directory(tmp_path: Path) -> None:
    assert store_entries(tmp_path / "none") == {}


def test_with_a_model_id_one_model_is_served(
    tree: Tree, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is then taken to hold only files of that model, as on SageMaker."""
    monkeypatch.setenv("HF_MODEL_ID", "org/model")
    store = tree("a/config.json", "b/config.json")
    assert main(["serve", "--model-dir", str(store)]) == 0
    assert served == [store]


def test_a_multi_model_endpoint_starts_without_models(
    served: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAGEMAKER_MULTI_MODEL", "true")
    assert main(["serve"]) == 0
    assert served == [{}]
    monkeypatch.setenv("HF_MODEL_ID", "org/model")
    assert main(["serve"]) == 2
    assert "do not set HF_MODEL_ID" in capsys.readouterr().err
    monkeypatch.delenv("HF_MODEL_ID")
    monkeypatch.setenv("OPTION_BATCHIN", "paged")
    assert main(["serve"]) == 2
    assert "OPTION_BATCHIN" in capsys.readouterr().err
    assert served == [{}]


def test_explain_covers_each_model(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    store = tree("a/serving.properties", "b/serving.properties")
    (store / "b" / "serving.properties").write_text("option.batching=dynamic\n")
    assert main(["explain", "--model-dir", str(store)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("models: a, b\n")
    assert "batching: dynamic" in printed.split("model b:")[1]
    assert "batching: dynamic" not in printed.split("model b:")[0]


def test_memory_shares_of_other_models_are_added() -> None:
    configuration = load_configuration(None, {"OPTION_GPU_MEMORY_UTILIZATION": "0.4"})
    assert with_gpu_share_of_others(configuration, 0.0) is configuration
    beside = with_gpu_share_of_others(configuration, 0.35)
    assert beside.options.memory.gpu_memory_utilization == pytest.approx(0.75)
    assert "0.4 of this model is added to 0.35" in beside.warnings[-1]
    assert (
        with_gpu_share_of_others(configuration, 0.6000001).options.memory.gpu_memory_utilization
        == 1.0
    )
