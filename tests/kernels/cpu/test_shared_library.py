"""Compiling and caching the C++ library, and error messages."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kernels.cpu import shared_library
from kernels.cpu.__main__ import main
from kernels.cpu.shared_library import TARGETS, LibraryError, build, find_compiler, host_target


@pytest.fixture
def quickly(monkeypatch):
    """Compile without optimization."""
    flags = [flag for flag in shared_library.FLAGS if flag != "-O3"]
    monkeypatch.setattr(shared_library, "FLAGS", (*flags, "-O0"))


@pytest.fixture
def one_source(quickly, monkeypatch):
    """Compile a part of the library without optimization."""
    monkeypatch.setattr(shared_library, "SOURCES", ("elementwise.cpp",))


@pytest.mark.usefixtures("one_source")
def test_the_library_is_compiled_once(tmp_path, monkeypatch):
    first = build(host_target(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [first.name], "no temporary files are left"
    ctypes.CDLL(str(first))
    monkeypatch.setattr(shared_library, "find_compiler", pytest.fail)
    assert build(host_target(), tmp_path) == first


@pytest.mark.usefixtures("one_source")
def test_of_those_who_need_it_at_once_only_one_compiles(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("LONGSHORE_CACHE", str(tmp_path))
    shared_library.build_early()
    with caplog.at_level("WARNING"):
        library = build(host_target(), tmp_path)
        while any(thread.name == "kernels" for thread in threading.enumerate()):
            time.sleep(0.01)
    assert [path.name for path in tmp_path.iterdir()] == [library.name]
    assert [record.getMessage() for record in caplog.records] == [
        f"compiling the CPU kernels for {host_target().name} (once)"
    ]


def test_compiling_early_leaves_errors_to_the_load(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSHORE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    shared_library.build_early()
    with pytest.raises(LibraryError, match="false failed"):
        shared_library.load_library.__wrapped__()


def test_compiling_needs_no_torch():
    """So it can run while torch is imported."""
    code = "import sys, kernels.cpu.shared_library; sys.exit('torch' in sys.modules)"
    root = Path(shared_library.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


@pytest.mark.usefixtures("one_source")
def test_changed_flags_give_another_file(tmp_path, monkeypatch):
    first = build(host_target(), tmp_path)
    monkeypatch.setattr(shared_library, "FLAGS", (*shared_library.FLAGS, "-DOTHER"))
    assert build(host_target(), tmp_path) != first


@pytest.fixture
def built(monkeypatch):
    """Copy the library instead of compiling it. Return the function that does."""
    library = build(host_target(), shared_library.cache_directory())

    def copy(target, directory):
        return Path(shutil.copy(library, directory))

    monkeypatch.setattr(shared_library, "build", copy)
    return copy


def test_a_library_of_the_wheel_needs_no_compiler(tmp_path, monkeypatch, built):
    monkeypatch.setattr(shared_library, "SHIPPED", tmp_path)
    built(host_target(), tmp_path)
    monkeypatch.setattr(shared_library, "build", pytest.fail)
    assert shared_library.load_library.__wrapped__().attend_fp32


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_an_unwritable_cache_is_not_needed(tmp_path, monkeypatch, reason, built):
    def refuse(target, directory):
        if directory == tmp_path:
            raise OSError(reason, os.strerror(reason))
        return built(target, directory)

    monkeypatch.setenv("LONGSHORE_CACHE", str(tmp_path))
    monkeypatch.setattr(shared_library, "build", refuse)
    assert shared_library.load_library.__wrapped__().attend_fp32
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("built")
def test_no_home_directory_is_needed(monkeypatch):
    """A container may run as a user id without an entry in /etc/passwd, and without $HOME."""
    for name in ("LONGSHORE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(RuntimeError):
        Path.home()
    assert shared_library.load_library.__wrapped__().attend_fp32


def test_a_library_that_no_directory_can_hold(monkeypatch):
    def refuse(target, directory):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_library, "build", refuse)
    with pytest.raises(LibraryError, match="No space left on device"):
        shared_library.load_library.__wrapped__()


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LibraryError, match=r"no C\+\+ compiler"):
        find_compiler()


def test_compiler_errors_are_quoted(tmp_path, monkeypatch):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'no room left' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(LibraryError, match=r"broken failed: no room left"):
        build(host_target(), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.matrix(cases=0)
@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("some", TARGETS, ids=lambda some: some.name)
def test_compiles_for_every_target_of_this_architecture(some, tmp_path):
    probe = [find_compiler(), *some.flags, "-E", "-x", "c++", "/dev/null"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip(f"the compiler does not know {some.name}")
    assert build(some, tmp_path).stat().st_size > 10_000


def test_an_unsupported_cpu(monkeypatch):
    monkeypatch.setattr(shared_library, "TARGETS", ())
    with pytest.raises(LibraryError, match="the CPU supports none of"):
        host_target()


def test_the_library_uses_torchs_openmp():
    """The library is not linked to an OpenMP runtime, so it uses the one that torch has loaded."""
    path = build(host_target(), shared_library.cache_directory())
    needed = subprocess.run(
        [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(path)!r})"],
        capture_output=True,
        text=True,
    )
    assert "undefined symbol" in needed.stderr, "without torch there is no OpenMP runtime"


@pytest.mark.usefixtures("one_source")
def test_the_command_compiles_for_every_target(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LONGSHORE_CACHE", str(tmp_path))
    assert main() == 0
    lines = capsys.readouterr()
    built = {path.name.split("-")[1] for path in tmp_path.iterdir()}
    assert host_target().name in built
    assert len(built) + lines.err.count("skipped ") == len(TARGETS)
    monkeypatch.setenv("CXX", "/bin/false")
    assert main() == 0, "the compiler is not needed, as everything is compiled"
