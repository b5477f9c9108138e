"""examples/ray_data is interrupted, loses an actor, and still gives one process's answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from longshore import LLM, SamplingParams
from tests.container.processes import ROOT, descendants, wait_until

pytest.importorskip("ray.data", reason="Ray is not installed; make fleet-test installs it")
from deploy.fleet.local_cluster import local_cluster

NUM_LINES, LINES_PER_PART = 1000, 25
BAD_LINES = {3: b"{", 500: b'{"id": "bad"}'}
MODEL = str(ROOT / "models" / "demo")
SAMPLING = {"temperature": 0, "max_tokens": 96}
"""With answers this long, a run takes ten seconds, so a signal comes before its end."""
END_S = 240


def prompt(number: int) -> str:
    return f"Citizen {number}: speak!\nROMEO:"


def test_nothing_is_lost_or_answered_twice(tmp_path: Path):
    source, output = tmp_path / "prompts.jsonl", tmp_path / "answers"
    numbers = range(1, NUM_LINES + 1)
    valid = {n: json.dumps({"id": n, "prompt": prompt(n)}).encode() for n in numbers}
    source.write_bytes(b"".join((valid | BAD_LINES)[n] + b"\n" for n in numbers))
    with local_cluster(2, 2) as address:
        arguments = ["--input", str(source), "--output", str(output), "--address", address]
        first = start(arguments)
        wait_until(lambda: is_running(first) and num_parts(output) >= 4, END_S)
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=END_S)
        assert first.returncode != 0
        before = num_parts(output)
        assert before < NUM_LINES / LINES_PER_PART

        second = start(arguments)
        wait_until(lambda: is_running(second) and num_parts(output) >= before + 4, END_S)
        old = set(actors())
        os.kill(min(old), signal.SIGKILL)
        assert num_parts(output) < NUM_LINES / LINES_PER_PART
        wait_until(lambda: is_running(second) and set(actors()) - old, END_S)
        text, errors = second.communicate(timeout=END_S)
        assert second.returncode == 0, errors
        left = NUM_LINES - before * LINES_PER_PART
        assert f"{left} lines processed" in text
    texts = [path.read_text() for path in sorted(output.glob("part-*"))]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    assert [row["line"] for row in rows] == list(numbers)
    assert {row["line"] for row in rows if row["error"] is not None} == BAD_LINES.keys()
    good = [row for row in rows if row["error"] is None]
    assert [row["text"] for row in good] == of_one_process([row["id"] for row in good])


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.ray_data.generate", *arguments]
    command += ["--model", MODEL, "--options", '{"dtype": "fp32"}', "--actors", "2"]
    command += ["--sampling", json.dumps(SAMPLING), "--lines-per-part", str(LINES_PER_PART)]
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_heed_sigint,
    )  # fmt: skip


def _heed_sigint() -> None:
    """Let SIGINT interrupt the command, even if a shell runs the tests in the background.

    A shell's background jobs ignore SIGINT, and their children inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def is_running(process: subprocess.Popen[str]) -> bool:
    assert process.poll() is None, process.communicate()
    return True


def num_parts(output: Path) -> int:
    return len(list(output.glob("part-*")))


def actors() -> list[int]:
    """Return the process ids of the actors of Ray Data. All nodes descend from this process."""
    pids = descendants(os.getpid())
    return [pid for pid in pids if b"ray::MapWorker" in command_line(pid)]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has ended since
        return b""


def of_one_process(numbers: Sequence[int]) -> list[str]:
    with LLM(MODEL, dtype="fp32") as llm:
        prompts = [prompt(number) for number in numbers]
        found = llm.generate(prompts, SamplingParams(**SAMPLING), use_tqdm=False)
    return [answer.outputs[0].text for answer in found]
