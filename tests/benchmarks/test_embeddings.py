"""The benchmark of embeddings: its texts, its figures, and a run of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks.cpu.http_server import ROOT
from benchmarks.embeddings import __main__ as benchmark
from benchmarks.embeddings import calls, model


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_texts_have_32_to_512_tokens_and_vectors_are_those_of_transformers(
    pooling, monkeypatch, tmp_path, capsys
):
    monkeypatch.setitem(model.SHAPES, "tiny", (16, 1, 2, pooling))
    model.write_model("tiny", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    lengths = [len(tokenizer(text)["input_ids"]) for text in model.make_texts(256)]
    assert (min(lengths), max(lengths)) == (32, 512)
    assert 130 < np.mean(lengths) < 160
    texts = model.make_texts(8)
    work = {"dtype": "fp32", "device": "cpu", "seconds": 0.01, "at_once": [1, 3], "texts": texts}
    (tmp_path / "work.json").write_text(json.dumps(work))
    calls.main("longshore", str(tmp_path), str(tmp_path / "work.json"))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["seconds"]) == ["1", "3"]
    assert all(min(taken) > 0 for taken in result["seconds"].values())
    expected = model.true_vectors(tmp_path, texts)
    np.testing.assert_allclose(result["vectors"], expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-5)


def test_ratios_are_medians_over_rounds():
    def results(*seconds):
        return [
            {"seconds": {size: [taken] for size in ("1", "8", "64")}, "cosine": 1 - taken / 100}
            for taken in seconds
        ]

    lines = benchmark.table({"longshore": results(1.0, 1.0, 2.0), "fastembed": results(2, 3, 9)})
    assert lines[4] == "| 8 | longshore | 8.0 (4.0 to 8.0) | 1.00× | 1980 | 0.980000 |"
    assert lines[5] == "| 8 | fastembed | 2.7 (0.9 to 4.0) | 3.00× | 8880 | 0.910000 |"


def test_systems_take_turns_in_environments_of_their_own(monkeypatch, tmp_path, capsys):
    def measure(system, python, *_):
        measured.append((system, str(python)))
        vectors = np.eye(calls.NUM_COMPARED, 32) if system == "fastembed" else expected
        return {
            "seconds": {str(size): [0.5] for size in benchmark.AT_ONCE},
            "vectors": vectors.tolist(),
        }

    measured, found_vectors = [], benchmark.true_vectors
    monkeypatch.setattr(benchmark, "_measure", measure)
    monkeypatch.setattr(benchmark, "versions", lambda _: {"torch": "1"})
    monkeypatch.setattr(benchmark, "disturbance", lambda name: [f"busy before {name}"])
    for name in ("fastembed", "infinity-emb"):
        (tmp_path / "peers" / name).mkdir(parents=True)
        (tmp_path / "peers" / name / "installed").touch()
    model.write_model("dry", tmp_path / "dry")
    texts = model.make_texts(benchmark.NUM_TEXTS)[: calls.NUM_COMPARED]
    expected = found_vectors(tmp_path / "dry", texts)
    arguments = ["--dry", "--vs", "infinity-emb,fastembed", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["benchmarks.embeddings", *arguments])
    assert benchmark.main() == 0
    python = tmp_path / "peers" / "{}" / "bin" / "python"
    others = [(name, str(python).format(name)) for name in ("infinity-emb", "fastembed")]
    assert measured == [("longshore", sys.executable), *others]
    found = json.loads((tmp_path / "embeddings.json").read_text())
    assert list(found["runs"]) == ["longshore", "infinity-emb", "fastembed"]
    assert found["runs"]["infinity-emb"][0]["cosine"] == pytest.approx(1, abs=1e-5)
    assert found["runs"]["fastembed"][0]["cosine"] < 0.9
    assert "busy before fastembed" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("given", "expected"), [("", str(ROOT)), ("a:b", f"{ROOT}{os.pathsep}a:b")]
)
def test_our_own_process_keeps_the_callers_path(given, expected, monkeypatch, tmp_path):
    def run(command, *, env, **_):
        paths.append(env["PYTHONPATH"])
        return subprocess.CompletedProcess(command, 0, b"{}")

    paths = []
    monkeypatch.setenv("PYTHONPATH", given)
    monkeypatch.setattr(subprocess, "run", run)
    for system in ("longshore", "fastembed"):
        benchmark._measure(system, tmp_path, tmp_path, tmp_path)
    assert paths == [expected, ""]


@pytest.mark.matrix(cases=0)
def test_the_benchmark_runs(tmp_path):
    command = [sys.executable, "-m", "benchmarks.embeddings", "--dry", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (ours,) = json.loads((tmp_path / "embeddings.json").read_text())["runs"]["longshore"]
    assert ours["cosine"] == pytest.approx(1, abs=1e-5)
    assert len(done.stdout.splitlines()) == 6, "a table of three rows, and the machine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vs", "tei"], "choose from sentence-transformers, infinity-emb, fastembed"),
        (["--peer-python", "x"], "--peer-python is for one system"),
        (["--vs", "fastembed", "--dtype", "bf16"], "fastembed computes in fp32"),
        (["--vs", "fastembed", "--device", "cuda"], "fastembed computes on CPUs"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks.embeddings", *arguments])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert message in capsys.readouterr().err
