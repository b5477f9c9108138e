"""Preparation before any process starts: the task, the custom handler and its packages."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from container.__main__ import main
from container.launch.preparation import prepare
from container.models.requirements import install_requirements_file
from core.errors import ConfigurationError
from tests.container.configurations import Load

HANDLER = "def handle(inputs): ...\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("tmp")))


@pytest.mark.parametrize(
    "code",
    [HANDLER, "async def handle(inputs): ...", "handle = print", "from x import answer as handle",
     "from x import *", "if True:\n    def model_fn(model_dir): ..."],
)  # fmt: skip
def test_a_model_py_with_handler_functions_is_the_handler(
    load: Load, tmp_path: Path, code: str
) -> None:
    (tmp_path / "model.py").write_text(code)
    prepared = prepare(load("option.temperature=7"), tmp_path)
    assert (prepared.task.kind, prepared.model_dir) == ("handler", tmp_path)
    assert prepared.task.name == str(tmp_path / "model.py")


@pytest.mark.parametrize("entry_point", ["serve.py", "serve", "{dir}/serve.py"])
def test_entry_point_names_another_file(load: Load, tmp_path: Path, entry_point: str) -> None:
    (tmp_path / "serve.py").write_text(HANDLER)
    (tmp_path / "model.py").write_text(HANDLER)
    prepared = prepare(load(f"option.entryPoint={entry_point.format(dir=tmp_path)}"), tmp_path)
    assert prepared.task.name == str(tmp_path / "serve.py")


def test_lmis_built_in_handlers_serve_the_model_itself(
    load: Load, tmp_path: Path, tokenizer_dir: Path
) -> None:
    (tmp_path / "model.py").write_text(HANDLER)
    text = f"option.entryPoint=djl_python.huggingface\noption.model_id={tokenizer_dir}"
    assert prepare(load(text), tmp_path).task.kind == "generation"


def test_a_model_py_without_functions_is_ignored_as_in_lmi(
    load: Load, tmp_path: Path, tokenizer_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.py").write_text("def some_other_function(): ...\n")
    prepared = prepare(load(f"option.model_id={tokenizer_dir}"), tmp_path)
    assert (prepared.task.kind, prepared.model_dir) == ("generation", tokenizer_dir)
    assert "defines neither handle(inputs) nor model_fn" in caplog.text


@pytest.mark.parametrize(
    ("code", "text", "message"),
    [
        ("def handle(inputs):\n  x =\n", "", "model.py:2: SyntaxError: invalid syntax"),
        ("x = 1\n", "", "so nothing can answer"),
        ("x = 1\n", "option.entryPoint=model.py\noption.model_id=/m", "so nothing can answer"),
        (HANDLER, "option.entryPoint=other.py", "there is no file"),
        (HANDLER, "option.entryPoint=djl_python.deepspeed", "set option.task"),
        (HANDLER, "option.entryPoint=https://x.org/model.py", "use a file"),
        (HANDLER, "option.batching=paged", "option.batching=none or dynamic"),
    ],
)
def test_invalid_handlers_are_rejected(
    load: Load, tmp_path: Path, code: str, text: str, message: str
) -> None:
    (tmp_path / "model.py").write_text(code)
    with pytest.raises(ConfigurationError) as caught:
        prepare(load(text), tmp_path)
    assert message in str(caught.value)


def test_handlers_get_the_properties(load: Load, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(HANDLER)
    (tmp_path / "weights").mkdir()
    configuration = load("option.my_threshold=0.5\nbatch_size=4\noption.model_id=weights\n")
    assert "passed to the handler" in configuration.warnings[0]
    assert prepare(configuration, tmp_path).task.properties == {
        "my_threshold": "0.5",
        "batch_size": "4",
        "model_id": str(tmp_path / "weights"),
    }
    hub = prepare(load("option.model_id=someone/something"), tmp_path)
    assert hub.task.properties == {"model_id": "someone/something"}, "the model is not downloaded"


@pytest.mark.parametrize("text", ["option.my_threshold=1", "my_threshold=1"])
def test_unknown_options_are_errors_without_a_handler(
    load: Load, tmp_path: Path, text: str
) -> None:
    with pytest.raises(ConfigurationError, match="unknown key"):
        load(text)
    (tmp_path / "model.py").write_text(HANDLER)
    if text.startswith("option."):
        load(text)
        with pytest.raises(ConfigurationError, match="unknown key"):
            load(f"{text}\noption.entryPoint=djl_python.huggingface")
    else:
        with pytest.raises(ConfigurationError, match="unknown key"):
            load(text)


def test_a_task_without_a_tokenizer(load: Load, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["ViTForImageClassification"]}')
    prepared = prepare(load(""), tmp_path)
    assert (prepared.task.kind, prepared.task.name) == ("pipeline", "image-classification")


def test_explain_names_the_task(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    arguments = ["explain", "--model-dir", str(tmp_path)]
    assert main(arguments) == 0
    assert (
        "task: text-embedding (the model is a BertModel, without a head)" in capsys.readouterr().out
    )
    (tmp_path / "model.py").write_text(HANDLER)
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"task: {tmp_path / 'model.py'} (the user's own code)" in out
    assert "batching: none (default: a handler gets one request at a time" in out
    (tmp_path / "model.py").write_text("def handle(inputs):\n    return (\n")
    assert main(arguments) == 2
    assert "model.py:2: SyntaxError" in capsys.readouterr().err


def wheel(directory: Path, name: str, code: str, version: str = "1.0", requires: str = "") -> None:
    """Build a wheel with one module."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)


class TestRequirements:
    def test_missing_packages_are_installed_beside_existing_ones(self, tmp_path: Path) -> None:
        wheel(tmp_path, "tiny_package", "VALUE = 42\n", requires="Requires-Dist: msgspec\n")
        path = tmp_path / "requirements.txt"
        path.write_text("--no-index\n--find-links .\nnumpy\ntiny_package\n")
        before = sorted(tmp_path.iterdir())
        installed = install_requirements_file(path)
        assert installed is not None
        assert sorted(tmp_path.iterdir()) == before, "the directory of the file may be read-only"
        names = {file.name for file in installed.iterdir()}
        assert "tiny_package.py" in names
        assert not {"numpy", "msgspec"} & names, "installed packages are not installed again"
        code = f"import sys; sys.path.insert(0, {str(installed)!r}); import numpy, tiny_package"
        assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0
        assert install_requirements_file(path) == installed, "a second start installs nothing"

    def test_changed_requirements_use_another_directory(self, tmp_path: Path) -> None:
        path = tmp_path / "requirements.txt"
        path.write_text("--no-index\nnumpy\n")
        first = install_requirements_file(path)
        path.write_text("--no-index\nmsgspec\n")
        assert install_requirements_file(path) != first

    def test_installation_errors(self, tmp_path: Path) -> None:
        path = tmp_path / "requirements.txt"
        path.write_text("--no-index\nno-such-package-anywhere\n")
        for _ in range(2):  # the second call must not use what the first has installed in part
            with pytest.raises(ConfigurationError) as caught:
                install_requirements_file(path)
            assert "option.install_requirements=false" in str(caught.value)
            assert "no-such-package-anywhere" in str(caught.value)

    def test_packages_are_only_installed_for_a_handler_and_if_enabled(
        self, load: Load, tmp_path: Path, tokenizer_dir: Path
    ) -> None:
        (tmp_path / "requirements.txt").write_text("--no-index\nno-such-package-anywhere\n")
        assert prepare(load(f"option.model_id={tokenizer_dir}"), tmp_path).library_dir is None
        (tmp_path / "model.py").write_text(HANDLER)
        with pytest.raises(ConfigurationError, match="cannot be installed"):
            prepare(load(""), tmp_path)
        assert prepare(load("option.install_requirements=false"), tmp_path).library_dir is None
        (tmp_path / "requirements.txt").unlink()
        assert prepare(load(""), tmp_path).library_dir is None
