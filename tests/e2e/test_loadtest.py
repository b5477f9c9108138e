"""The load test against a running container, directly and through boto3, and one that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.study.results import Results, Run, read_results
from models.windows import write
from tests.e2e.serving import DEMO, IMAGE, ROOT, serve

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
SMALL = ["--users", "3", "--requests", "6", "--warm-up", "2", "--length-scale", "0.05"]
SMALL += ["--rounds", "1"]


def loadtest(out: Path, *arguments: str) -> Results:
    command = [sys.executable, "-m", "loadtest", "compare", *SMALL, "--out", str(out), *arguments]
    environment = os.environ | CREDENTIALS | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=110, env=environment
    )
    assert done.returncode == 0, done.stderr
    return read_results(out)


def check(run: Run) -> None:
    """Check that all requests are complete and that the server's counters agree."""
    measures = run.measures
    errors = [record.error for record in run.records if record.error]
    assert (measures.num_good, measures.num_short, errors) == (6, 0, [])
    assert run.tokens_per_word == 1.0, "each word of the prompts is one token"
    tokens = sum(record.output_tokens or 0 for record in run.records)
    assert tokens == sum(record.asked_tokens for record in run.records)
    first, last = run.samples[0].metrics, run.samples[-1].metrics
    assert last["queue_count"] - first["queue_count"] == 6
    # Each sequence in a step gives one token: a prefill the answer's first, a decode the next.
    assert last["step_sequences"] - first["step_sequences"] == tokens
    assert measures.inside.batch is not None
    assert measures.inside.batch > 1


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory):
    properties = "option.local_runtime_api=true\noption.max_model_len=256\n"
    with serve(tmp_path_factory.mktemp("served"), properties) as container:
        yield f"http://127.0.0.1:{container.port}"


@pytest.mark.matrix(cases=0)
def test_both_schemas_in_one_load_test(url: str, tmp_path: Path) -> None:
    lmi, openai = loadtest(tmp_path, "--target", url, "--subject", f"openai=openai+{url}").runs
    assert openai.name == "openai"
    check(lmi)
    for record in lmi.records:
        assert record.timings is not None
        times = [getattr(record.timings, name) for name in record.timings.__struct_fields__]
        assert times == sorted(times)
        assert times[-1] - times[0] <= record.latency_s, "the server's time is within the client's"

    check(openai)
    counted = {record.prompt_tokens for record in openai.records}
    assert counted <= {3, 6, 13, 4, 7, 14}, (
        "as requested, or one more for a first word without a space"
    )
    assert not counted <= {3, 6, 13}, "as counted by the server, not as requested"


@pytest.mark.matrix(cases=0)
def test_load_test_through_boto3(url: str, tmp_path: Path) -> None:
    (run,) = loadtest(tmp_path, "--sagemaker", "demo", "--target", url).runs
    check(run)
    assert run.name == "demo"
    assert all(record.timings is not None for record in run.records)


@pytest.mark.matrix(cases=0)
def test_a_strategy_beside_running_servers(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", url)
    properties = tmp_path / "serving.properties"
    properties.write_text(f"option.model_id={DEMO}\noption.max_model_len=256\n")
    runs = loadtest(
        tmp_path / "out", "--strategies", "paged", "--properties", str(properties),
        "--subject", f"other=openai+{url}", "--subject", "endpoint=sagemaker:demo",
    ).runs  # fmt: skip
    assert [run.name for run in runs] == ["paged", "other", "endpoint"]
    asked = [[record.asked_tokens for record in run.records] for run in runs]
    assert asked[0] == asked[1] == asked[2]
    assert [run.measures.num_good for run in runs] == [6, 6, 6]
    knows_processes = [run.samples[-1].server_cpu is not None for run in runs]
    assert knows_processes == [True, IMAGE is None, False]


def test_load_test_starts_a_container(tmp_path: Path) -> None:
    properties = tmp_path / "serving.properties"
    properties.write_text(f"option.model_id={DEMO}\noption.max_model_len=256\n")
    (run,) = loadtest(
        tmp_path / "out", "--strategies", "continuous", "--properties", str(properties)
    ).runs
    check(run)
    assert run.name == "continuous"
    assert run.settings["option.batching"] == "continuous"
    assert run.samples[-1].server_cpu is not None, "the load test knows its server's processes"
    log = (tmp_path / "out" / "logs" / "01-continuous.log").read_text()
    assert "continuous" in log
    assert _processes_with(str(tmp_path)) == [], "all processes of the container have ended"


@pytest.mark.matrix(cases=0)
def test_the_report_shows_that_freed_windows_let_more_run_at_once(tmp_path: Path) -> None:
    """Both models have the same memory, 30 blocks, and most of their answers have 150 tokens."""
    most: dict[str, float] = {}
    for name, model in {"demo": DEMO, "windows": write(tmp_path / "model", window=16)}.items():
        properties = tmp_path / f"{name}.properties"
        properties.write_text(
            f"option.model_id={model}\noption.max_model_len=256\noption.num_kv_blocks=30\n"
        )
        (run,) = loadtest(
            tmp_path / name, "--strategies", "paged", "--properties", str(properties),
            "--users", "12", "--requests", "36", "--length-scale", "0.5",
        ).runs  # fmt: skip
        errors = [record.error for record in run.records if record.error]
        assert (run.measures.num_good, errors) == (36, [])
        most[name] = max(run.batches)
        assert "most at once" in (tmp_path / name / "report.html").read_text()
    assert most["windows"] > most["demo"]


def _processes_with(text: str) -> list[int]:
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/environ")
        if text in _read(path.parent / "cmdline")
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("schema", ["lmi", "openai"])
@pytest.mark.parametrize("workload", ["parallel", "beam"])
def test_workloads_of_several_sequences(
    url: str, tmp_path: Path, workload: str, schema: str
) -> None:
    (run,) = loadtest(tmp_path, "--target", url, "--workload", workload, "--schema", schema).runs
    measures = run.measures
    errors = [record.error for record in run.records if record.error]
    assert (measures.num_good, measures.num_short, errors) == (6, 0, [])
    assert measures.inside.batch is not None
    assert measures.inside.batch > 3, "samples and beams count as sequences"
