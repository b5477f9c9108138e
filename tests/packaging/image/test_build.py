"""The contents of the image, without building it; `make image-check` builds it."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.container.processes import ROOT
from tests.packaging.scripts import load

cut = load("image/cut.py")


def requirements(device: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "packaging/image/requirements.py", device]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_cpu_image_has_no_triton():
    cuda, cpu = (requirements(device).stdout.splitlines() for device in ("cuda", "cpu"))
    assert [package.split(">")[0] for package in cuda if package not in cpu] == ["triton"]
    assert set(cpu) < set(cuda)
    assert {"boto3>=1.43"} < set(cpu), "models on S3 need boto3"
    assert not [package for package in cuda if package.startswith(("pytest", "moto", "ruff"))]


def test_an_unknown_device_is_rejected():
    done = requirements("tpu")
    assert done.returncode == 1
    assert "DEVICE=tpu: expected cuda or cpu" in done.stderr


def test_cutting_removes_files_and_directories(tmp_path, capsys):
    (tmp_path / "one" / "tests").mkdir(parents=True)
    (tmp_path / "one" / "tests" / "big").write_bytes(bytes(2**20))
    (tmp_path / "one" / "lib.a").write_bytes(bytes(2**20))
    (tmp_path / "one" / "kept.py").touch()
    for pattern in ("**/tests", "**/*.a", "none"):
        cut.remove(pattern, tmp_path.glob(pattern))
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["kept.py"]
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert printed == [["1.0", "MiB", "**/tests"], ["1.0", "MiB", "**/*.a"], ["0.0", "MiB", "none"]]


def test_copied_files_are_in_the_build_context():
    """.dockerignore lists what is sent, so that nothing else gets into the image by accident."""
    sent = set((ROOT / ".dockerignore").read_text().replace("!", "").split())
    copies = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    sources = {name for copy in copies for name in copy.split()}
    assert {name for name in sources if not name.startswith("packaging/image/")} <= sent
    assert all((ROOT / name).exists() for name in sources)
    packages = set(re.findall(r'"(\w+)\*"', (ROOT / "pyproject.toml").read_text()))
    assert packages <= sources, "all packages of the server are copied"
