"""Serves the demo model, and writes docs/conformance.md after all cases have run.

Each module calls one client as its users do. `make conformance` runs them in an environment that
has the clients and nothing of ours; the server runs in ours.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
START_S = 120
MAX_MODEL_LEN = 4096
CLIENTS = {
    "test_openai": "openai",
    "test_anthropic": "anthropic",
    "test_litellm": "litellm",
    "test_instructor": "instructor",
    "test_huggingface": "huggingface_hub",
    "test_langchain": "langchain-openai, langchain-anthropic",
}
"""The packages that each module calls."""
PAGE = """# Conformance

Other people's clients, in an environment of their own, call the demo model as their users do.
`make conformance` runs them and writes this page. The cases are in [conformance](../conformance);
the [contract](contract.md) lists what clients may send.

| client | cases | failed |
| --- | --- | --- |
"""


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server: LONGSHORE_URL, or one that is started here."""
    given = os.environ.get("LONGSHORE_URL")
    if given:
        yield given
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = _longer_demo(tmp_path_factory.mktemp("model") / "demo")
    properties = str(ROOT / "conformance" / "serving.properties")
    server = subprocess.Popen(
        [ROOT / ".venv/bin/python", "-m", "container", "serve", "--port", str(port),
         "--model-dir", model, "--properties", properties],
        cwd=ROOT,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(address, server)
        yield address
    finally:
        server.terminate()
        server.wait()


def _longer_demo(path: Path) -> Path:
    """Copy the demo model with room for the long prompts that clients write for schemas."""
    shutil.copytree(ROOT / "models" / "demo", path)
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = MAX_MODEL_LEN
    (path / "config.json").write_text(json.dumps(config))
    return path


def _wait_until_ready(address: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{address}/ping").close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not start within {START_S} s")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the page if every client has run."""
    outcomes: dict[str, dict[str, bool]] = defaultdict(dict)
    for category in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(category, []):
            module, _, case = report.nodeid.partition("::")
            name = Path(module).stem
            outcomes[name][case] = category == "passed" and outcomes[name].get(case, True)
    if outcomes.keys() != CLIENTS.keys():
        return
    rows = [_row(packages, outcomes[module]) for module, packages in CLIENTS.items()]
    (ROOT / "docs" / "conformance.md").write_text(PAGE + "\n".join(rows) + "\n")


def _row(packages: str, cases: dict[str, bool]) -> str:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages.split(", ")]
    failed = [f"`{case}`" for case, has_passed in cases.items() if not has_passed]
    return f"| {', '.join(versions)} | {len(cases)} | {', '.join(failed) or 'none'} |"
