"""Serving end to end: real processes, the demo model, HTTP."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.container.processes import free_port
from tests.e2e.serving import DEMO, ROOT, serve


def test_ctrl_c_while_a_request_runs_ends_every_process(tmp_path):
    with serve(tmp_path) as container, container.stream("ROMEO:", max_new_tokens=40) as lines:
        next(lines)
        assert container.stop(signal.SIGINT) == 0
        assert list(lines)[-1]["generated_text"], "running requests may finish"


@pytest.mark.matrix(cases=0)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("dynamic", "dynamic"), ("continuous", "continuous"), ("paged", "paged")],
)
def test_configurations_of_the_aws_article_start_two_ranks(tmp_path, name, strategy):
    text = (ROOT / "examples" / "aws" / f"{name}.properties").read_text()
    with serve(tmp_path, text.replace("max_batch_delay=1000", "max_batch_delay=10")) as container:
        container.wait_for_log(f"batching: {strategy} (")
        container.wait_for_log("layout: 1 copy x 2 ranks on cpu")
        assert container.invoke("ROMEO:", max_new_tokens=4)["generated_text"]


def container(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "container", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_a_typo_in_a_key_is_rejected_with_the_right_name(tmp_path):
    path = tmp_path / "serving.properties"
    path.write_text("option.rolling_bach=auto\n")
    done = container("serve", "--properties", str(path))
    assert done.returncode == 2
    assert "did you mean 'option.rolling_batch'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_run_as_asked_ends_with_the_reason(tmp_path):
    properties = "option.max_model_len=100000\n"
    path = tmp_path / "serving.properties"
    path.write_text(properties)
    files = ["--properties", str(path), "--model-dir", str(DEMO)]
    done = container("serve", "--port", str(free_port()), *files)
    assert done.returncode == 2
    assert "option.max_model_len=100000: the model was trained for" in done.stderr
    assert "Traceback" not in done.stderr


def test_explain_prints_everything(tmp_path):
    done = container("explain", "--properties", str(ROOT / "examples" / "aws" / "paged.properties"))
    assert done.returncode == 0
    is_set, _, is_default = done.stdout.partition("  all others:\n")
    assert "option.max_rolling_batch_size=64" in is_set
    assert "batching: paged (option.rolling_batch=auto)" in is_set
    lines = is_default.splitlines()
    assert len(lines) > 60
    assert all(line.endswith("  default") for line in lines)
