"""Serving end to end: real processes, the demo model, HTTP."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from engine import LLM, SamplingParams
from tests.container.processes import free_port
from tests.e2e.serving import DEMO, ROOT, serve

STRATEGIES = ("none", "dynamic", "continuous", "paged")
PROMPTS = ("ROMEO:", "First Citizen:\nBefore we proceed any further, hear me", "KING")
NUM_NEW = 24


@pytest.fixture(scope="module")
def expected():
    """Answers of the offline engine, which other tests compare with transformers."""
    llm = LLM(DEMO, batching="none", dtype="fp32")
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW)
    requests = llm.generate(PROMPTS, params, use_tqdm=False)
    return {request.prompt: request.outputs[0].text for request in requests}


@pytest.mark.parametrize("batching", STRATEGIES)
def test_every_strategy_serves_the_same_text(tmp_path, expected, batching):
    """Streamed and whole, several clients at once; then a disconnect; then SIGTERM."""
    with serve(tmp_path, f"option.batching={batching}\noption.dtype=fp32\nbatch_size=4\n") as it:
        it.wait_for_log(f"batching: {batching} (option.batching={batching})")
        answers, streams = {}, {}

        def whole(prompt):
            answers[prompt] = it.invoke(prompt, max_new_tokens=NUM_NEW)["generated_text"]

        def streamed(prompt):
            with it.stream(prompt, max_new_tokens=NUM_NEW) as lines:
                streams[prompt] = list(lines)

        jobs = [threading.Thread(target=do, args=(p,)) for p in PROMPTS for do in (whole, streamed)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        assert answers == expected
        for prompt, lines in streams.items():
            assert "".join(line["token"]["text"] for line in lines) == expected[prompt]
            assert lines[-1]["generated_text"] == expected[prompt]
            assert not any(line["generated_text"] for line in lines[:-1])

        with (
            it.events() as events,
            it.stream("ROMEO:", max_new_tokens=900, ignore_eos=True) as lines,
        ):
            next(lines)
            check_live_page(events, batching)
        assert (
            it.invoke(PROMPTS[0], max_new_tokens=NUM_NEW)["generated_text"] == answers[PROMPTS[0]]
        )
        assert it.stop() == 0


def check_live_page(events, batching):
    """Check that the events show a request that is running."""
    name, about = next(events)
    assert (name, about["batching"], about["executor"]) == ("engine", batching, "packed")
    running = next(
        data["snapshot"]
        for name, data in events
        if name == "snapshot" and data["snapshot"]["num_running"]
    )
    (sequence,) = running["sequences"]
    assert sequence["phase"] == "decode"
    assert sum(length for _, length in sequence["blocks"]) == running["num_held_blocks"] > 0


def test_ctrl_c_while_a_request_runs_ends_every_process(tmp_path):
    with serve(tmp_path) as it, it.stream("ROMEO:", max_new_tokens=40) as lines:
        next(lines)
        assert it.stop(signal.SIGINT) == 0
        assert list(lines)[-1]["generated_text"], "running requests may finish"


def test_tokens_are_streamed_as_they_are_generated(tmp_path):
    with serve(tmp_path, "option.dtype=fp32") as it:
        with it.stream("ROMEO:", max_new_tokens=300, ignore_eos=True) as lines:
            started = time.monotonic()
            next(lines)
            first = time.monotonic() - started
            count = 1 + sum(1 for _ in lines)
            last = time.monotonic() - started
        assert count == 300
        assert first < last / 3


def test_invalid_input_is_a_4xx_that_names_the_field(tmp_path):
    with serve(tmp_path) as it, it.stream("ROMEO:", max_new_tokens=400) as lines:
        next(lines)
        for body, field in (
            ({"inputs": "x", "parameters": {"max_new_token": 4}}, "parameters.max_new_token"),
            ({"inputs": "x", "parameters": {"top_p": 7}}, "parameters.top_p"),
            ({"inputs": "x", "parameters": {"temperature": "hot"}}, "parameters.temperature"),
            ({"inputs": "x " * 5000}, "inputs"),
            ({"inputs": "x", "parameters": {"max_new_tokens": 5000}}, "parameters.max_new_tokens"),
            ({"inputs": []}, "inputs"),
            (b"{", "body"),
        ):
            status, data = it.request("POST", "/invocations", body)
            assert (status, json.loads(data)["field"]) == (400, field)
        assert list(lines)[-1]["generated_text"]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("dynamic", "dynamic"), ("continuous", "continuous"), ("paged", "paged")],
)
def test_configurations_of_the_aws_article_start_two_ranks(tmp_path, name, strategy):
    text = (ROOT / "examples" / "aws" / f"{name}.properties").read_text()
    with serve(tmp_path, text.replace("max_batch_delay=1000", "max_batch_delay=10")) as it:
        it.wait_for_log(f"batching: {strategy} (")
        it.wait_for_log("layout: 1 copy x 2 ranks on cpu")
        assert it.invoke("ROMEO:", max_new_tokens=4)["generated_text"]


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
    assert "option.max_rolling_batch_size=64" in done.stdout
    assert "batching: paged (option.rolling_batch=auto)" in done.stdout
