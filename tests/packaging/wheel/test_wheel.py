"""A wheel puts all packages below `longshore`, and works beside others named `core` or `engine`."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from kernels.cpu.shared_library import TARGETS, file_name
from tests.packaging.scripts import load

_script = load("wheel/one_package.py")
PACKAGES, with_full_names = _script.PACKAGES, _script.with_full_names


ROOT = Path(__file__).resolve().parents[3]
BUILD = "import sys; sys.path.insert(0, 'packaging/wheel'); import one_package; \
one_package.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-c", BUILD, folder], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder with the wheel's files, and with somebody else's packages of our names."""
    folder = wheel.parent / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for name in PACKAGES:
        (folder / f"{name}.py").write_text("raise ImportError('somebody else wrote this')\n")
    return folder


def run(installed: Path, *arguments: str) -> str:
    """Run Python with the installed packages, outside the repository."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={"PYTHONPATH": str(installed)},
        cwd=installed.parent,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def test_everything_is_below_one_folder(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (top_level,) = (name for name in names if name.endswith("top_level.txt"))
        assert archive.read(top_level).split() == [b"longshore"]
    folders = {name.partition("/")[0] for name in names}
    assert folders == {"longshore", f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"}
    assert not [name for name in names if "__pycache__" in name]


def test_every_file_of_the_server_is_there(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    folders = [*sorted(PACKAGES - {"benchmarks"}), "models/demo"]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    ours = {path.relative_to(ROOT).as_posix() for path in files if path.suffix != ".pyc"}
    # Manifests and the packages' own pages are read in a checkout, so the wheel may lack them.
    manifests = ("deploy/kubernetes/", "deploy/monitoring/")
    ours = {name for name in ours if not name.startswith(manifests)}
    ours -= {name for name in ours if name.endswith("/README.md") and "models/" not in name}
    assert {f"longshore/{name}" for name in ours} <= names


@pytest.mark.matrix(cases=0)
def test_a_wheel_may_have_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = tmp_path / "compiler"  # writes empty files
    compiler.write_text('#!/bin/sh\nfor last; do :; done; : > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    build = BUILD.replace("sys.argv[1]", "sys.argv[1], {'kernels': 'yes'}")
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=ROOT, check=True)
    (path,) = tmp_path.glob("*.whl")
    assert path.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_')}.whl")
    with zipfile.ZipFile(path) as archive:
        files = {Path(name).name for name in archive.namelist() if name.endswith(".so")}
    assert files == {file_name(target) for target in TARGETS}


def test_no_module_imports_a_name_outside_longshore(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        sources = {name: archive.read(name) for name in names if name.endswith(".py")}
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            for module in modules:
                root, *rest = module.split(".")
                assert root not in PACKAGES, f"{file} imports {module}"
                path = "/".join([root, *rest])
                is_there = f"{path}.py" in names or f"{path}/__init__.py" in names
                assert root != "longshore" or is_there, f"{file} imports {module}"


def test_commands_run_beside_packages_with_the_same_names(installed: Path):
    explained = run(installed, "-m", "longshore", "explain", "--batching", "dynamic")
    assert explained.startswith("  batching: dynamic (option.batching=dynamic)\n")
    assert f"  model: {installed}/longshore/models/demo\n" in explained
    assert "usage: longshore load sweep" in run(
        installed, "-m", "longshore", "load", "sweep", "--help"
    )
    code = "from longshore import SamplingParams; print(SamplingParams(top_k=3).top_k)"
    assert run(installed, "-c", code) == "3\n"


def test_processes_are_started_by_their_full_names(installed: Path):
    code = (
        "from longshore.container.launch.supervisor import Commands\n"
        "from longshore.loadtest.servers import server\n"
        "print(Commands().engine[-1], Commands().front_end[-1], server.PACKAGE_PREFIX)"
    )
    names = run(installed, "-c", code)
    assert names == "longshore.engine longshore.container.front_end.start longshore.\n"


def test_user_code_finds_djl_python(installed: Path, tmp_path: Path):
    handler = tmp_path / "model.py"
    handler.write_text(
        "from djl_python import Output\nfrom djl_python.outputs import Output as O\n"
    )
    code = (
        "from pathlib import Path\n"
        "from longshore.core.process.user_code import run_file\n"
        "from longshore.engine.tasks.handlers.djl_python import Output\n"
        f"module = run_file(Path({str(handler)!r}))\n"
        "print(module.Output is Output, module.O is Output)"
    )
    assert run(installed, "-c", code) == "True True\n"


@pytest.mark.parametrize(
    ("source", "moved"),
    [
        ("from core import options\n", "from longshore.core import options\n"),
        ("from core.text.grammar import (\n  a,\n)\n",
         "from longshore.core.text.grammar import (\n  a,\n)\n"),
        ("if x:\n    import engine.llm as llm, os\n",
         "if x:\n    import longshore.engine.llm as llm, os\n"),
        ("'é'; from core import a; from kernels import b\n",
         "'é'; from longshore.core import a; from longshore.kernels import b\n"),
        ("from . import core\nimport corelib, os\n'from core import x'\n# import core\n",) * 2,
    ],
)  # fmt: skip
def test_only_imports_change(source: str, moved: str):
    assert with_full_names(source, "file.py") == moved


def test_an_import_that_binds_a_package_is_refused():
    with pytest.raises(
        ValueError, match=r"^file\.py:2: import core\.configuration\.options cannot be moved"
    ):
        with_full_names("\nimport core.configuration.options\n", "file.py")
