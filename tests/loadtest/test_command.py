"""The command line, in its own process because locust monkey-patches the process it runs in."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.study.results import Results, read_results
from tests.container.processes import free_port, running, wait_until
from tests.loadtest.stub import Stub, lmi, openai, serving

ROOT = Path(__file__).parents[2]


def loadtest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def compare(stub: Stub, out: Path, *arguments: str) -> Results:
    common = ["--target", stub.url, "--users", "3", "--length-scale", "0.05", "--rounds", "1"]
    done = loadtest("compare", *common, *arguments, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stdout
    assert (out / "report.html").is_file()
    return read_results(out)


def test_a_running_server(stub: Stub, tmp_path: Path) -> None:
    """Two workloads in an open loop, with /metrics sampled meanwhile."""
    arguments = ["--workload", "aws,burst", "--requests", "12", "--warm-up", "2", "--rate", "15"]
    found = compare(stub, tmp_path, *arguments)
    assert [run.workload for run in found.runs] == ["aws", "burst"]
    for run in found.runs:
        assert (run.measures.num_good, run.measures.num_errors) == (12, 0)
        assert run.measures.num_short == 0
        assert run.measures.late_s is not None
        assert run.samples[0].metrics == {"running": 2.0, "kv_used": 0.5}
        assert run.measures.client_cpu is not None
        assert run.loop.startswith("open loop")
    assert len(stub.bodies) == 1 + 2 * (12 + 2), "a probe, then warm-up and requests"


def test_a_missing_package_is_reported_before_measuring(stub: Stub, tmp_path: Path) -> None:
    without = "import sys; sys.modules['vl_convert'] = None; from loadtest.__main__ import main; "
    compare = f"main(['compare', '--target', '{stub.url}', '--out', '{tmp_path}'])"
    command = [sys.executable, "-c", without + compare]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "vl_convert" in done.stderr
    assert not stub.bodies


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("workload", ["parallel", "beam"])
def test_workloads_of_several_sequences(stub: Stub, tmp_path: Path, workload: str) -> None:
    found = compare(stub, tmp_path, "--workload", workload, "--requests", "6", "--warm-up", "0")
    assert found.runs[0].measures.num_good == 6
    assert found.runs[0].users == 3
    parameters = [body["parameters"] for body in stub.bodies[1:]]
    key = {"parallel": "n", "beam": "num_beams"}[workload]
    assert [parameter[key] for parameter in parameters] == [4] * 6


RECORDED = """
import sys
import locust
from loadtest.__main__ import main
from loadtest.study import subjects

class Server:
    def __init__(self, settings, log, **others):
        self.url, self.start_s = {url!r}, 0.0
    def __enter__(self):
        return self
    def __exit__(self, *error):
        pass
    def processes(self):
        return []

subjects.Server = Server
sys.exit(main({arguments!r}))
"""
"""A comparison whose containers are the stub."""


@pytest.mark.matrix(cases=0)
@pytest.mark.parametrize("names", [["none", "paged"]])
def test_each_recorded_run_has_a_server(stub: Stub, tmp_path: Path, names: list[str]) -> None:
    arguments = [
        "compare", "--record", "--strategies", ",".join(names), "--requests", "3", "--users", "2",
        "--no-tuning", "--rounds", "2", "--warm-up", "0", "--length-scale", "0.05", "--out",
        str(tmp_path), "--workload", "shared-prefix",
    ]  # fmt: skip
    script = RECORDED.format(url=stub.url, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = read_results(tmp_path)
    assert found.fresh_servers
    folders = [run.settings["option.record"] for run in found.runs]
    assert folders == [str(tmp_path / "recordings" / name) for name in (*names, *reversed(names))]


@pytest.mark.matrix(cases=0)
def test_a_sweep(stub: Stub, tmp_path: Path) -> None:
    def slow_at_first(path: str, body: dict[str, Any]) -> Iterator[bytes | float]:
        yield 0.05
        yield from lmi(path, body)

    stub.script = slow_at_first
    done = loadtest(
        "sweep", "--target", stub.url, "--seconds", "1.2", "--length-scale", "0.02", "--warm-up",
        "0", "--rates", "20,40", "--slo", "ttft_p99=10s,itl_p50=10s", "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = read_results(tmp_path)
    assert [run.rate for run in found.runs] == [20.0, 40.0]
    assert [len(run.records) for run in found.runs] == [24, 48]
    assert found.slo == {"ttft_p99": 10.0, "itl_p50": 10.0}
    assert found.objective == {"ttft": 10.0, "itl": 10.0}
    assert "sustains" in (tmp_path / "report.html").read_text()


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_writes_the_results_so_far(
    stub: Stub, tmp_path: Path, number: signal.Signals
) -> None:
    answers = count()

    def endless(path: str, body: dict[str, Any]) -> Iterator[bytes | float]:
        if next(answers) > 4:  # after the probe and four requests
            yield 60.0
        yield from lmi(path, body)

    stub.script = endless
    arguments = ["-m", "loadtest", "compare", "--target", stub.url, "--warm-up", "0"]
    arguments += ["--users", "2", "--length-scale", "0.05", "--out", str(tmp_path)]
    with running(arguments) as process:
        wait_until(lambda: len(stub.bodies) == 7, 60)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "report.html" in output
    (run,) = read_results(tmp_path).runs
    assert not run.is_whole
    assert run.measures.num_good == 4
    assert "interrupted" in (tmp_path / "report.html").read_text()


def test_an_unresponsive_server_is_an_immediate_error(stub: Stub, tmp_path: Path) -> None:
    stub.status = 503
    done = loadtest("compare", "--target", stub.url, "--out", str(tmp_path))
    assert done.returncode == 1
    address = stub.url.removeprefix("http://")
    assert f"{address} at {stub.url} does not answer: 503" in done.stderr
    assert len(stub.bodies) == 1


def test_servers_in_turns_get_the_same_requests(stub: Stub, tmp_path: Path) -> None:
    """One server has LMI's schema, the other one OpenAI's."""
    with serving(openai) as other:
        done = loadtest(
            "compare", "--strategies", "", "--subject", f"one={stub.url}", "--subject",
            f"two=openai+{other.url}", "--users", "2", "--requests", "4", "--rounds", "2",
            "--warm-up", "0", "--length-scale", "0.05", "--out", str(tmp_path),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        prompts = sorted(body["inputs"] for body in stub.bodies)
        assert prompts == sorted(body["prompt"] for body in other.bodies)
    assert len(prompts) == 1 + 2 * 4
    found = read_results(tmp_path)
    assert [run.name for run in found.runs] == ["one", "two", "two", "one"]
    assert found.objective == {"ttft": 2.0, "itl": 0.2}
    assert all(run.measures.num_good == 4 for run in found.runs)


def test_a_server_that_is_down_is_an_error_before_any_measurement(
    stub: Stub, tmp_path: Path
) -> None:
    done = loadtest(
        "compare", "--strategies", "", "--subject", f"up={stub.url}", "--subject",
        "down=http://127.0.0.1:9", "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 1
    assert "down at http://127.0.0.1:9 does not answer: ConnectionRefusedError" in done.stderr
    assert len(stub.bodies) == 1, "only the probe was sent"


def test_running_the_locustfile_by_hand(stub: Stub) -> None:
    """Statistics are named by strategy, and only whole requests count in the total.

    The rows for first tokens and stalls do not count.
    """
    port = free_port()
    stub.metrics += 'longshore:kv_blocks{model_name="stub",batching="paged"} 40.0\n'
    command = [
        sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--autostart",
        "--autoquit", "2", "--web-host", "127.0.0.1", "--web-port", str(port), "--host",
        stub.url, "--users", "2", "--spawn-rate", "2", "--run-time", "60s", "--workload",
        "shared-prefix", "--length-scale", "0.05", "--stop-timeout", "5",
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        wait_until(lambda: len(stub.bodies) > 6)
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    rows = re.findall(
        r"^(request|first token|stall|) +(?:shared-prefix on paged|Aggregated) +(\d+) +0\(0.00%\)",
        output,
        re.MULTILINE,
    )
    counts = {kind or "total": int(count) for kind, count in rows}
    assert counts.keys() == {"request", "first token", "stall", "total"}
    assert counts["total"] == counts["request"] == counts["first token"] == len(stub.bodies) > 4


@pytest.mark.matrix(cases=3)
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            ["compare", "--workload", "awss", "--out", "x"],
            "unknown workload awss; choose from aws, chat",
        ),
        (["sweep", "--slo", "ttft=1", "--out", "x"], "invalid bound 'ttft=1'"),
        (["compare", "--slo", "p99=1s", "--out", "x"], "invalid bound 'p99=1s'"),
        (["compare", "--properties", "nowhere", "--out", "x"], "nowhere is not a file"),
        (["compare", "--rate", "0", "--out", "x"], "0 is not greater than 0"),
        (["report", "x"], "--out"),
        (["compare", "--subject", "host:8000"], "invalid subject 'host:8000': expected NAME=URL"),
        (["compare", "--subject", "paged=http://x"], "the name is taken"),
        (["compare", "--subject", "a=http://x", "--subject", "a=http://y"], "the name is taken"),
        (["compare", "--strategies", ""], "nothing to measure"),
    ],
)
def test_wrong_command_lines(arguments: list[str], part: str) -> None:
    done = loadtest(*arguments)
    assert done.returncode == 2
    assert part in done.stderr


def test_help_names_the_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    text = capsys.readouterr().out
    assert "long-prompt-among-streams" in text
    assert "--sagemaker" in text
