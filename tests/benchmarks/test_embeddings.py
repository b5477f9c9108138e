"""The benchmark of embeddings: its texts, its figures, and a run of our side."""

from __future__ import annotations

import json

import numpy as np
from transformers import AutoTokenizer

from benchmarks.embeddings import calls, model
from benchmarks.embeddings.__main__ import PEER, table


def test_texts_have_32_to_512_tokens(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(model.SHAPES, "tiny", (16, 1, 2))
    model.write_model("tiny", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    lengths = [len(tokenizer(text)["input_ids"]) for text in model.make_texts(256)]
    assert (min(lengths), max(lengths)) == (32, 512)
    assert 130 < np.mean(lengths) < 160
    work = {"dtype": "fp32", "seconds": 0.01, "at_once": [1, 3], "texts": model.make_texts(8)}
    (tmp_path / "work.json").write_text(json.dumps(work))
    calls.main("longshore", str(tmp_path), str(tmp_path / "work.json"))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["seconds"]) == ["1", "3"]
    assert all(min(taken) > 0 for taken in result["seconds"].values())
    np.testing.assert_allclose(np.linalg.norm(result["vectors"], axis=1), 1, atol=1e-5)


def test_the_ratio_is_a_median_over_rounds():
    def result(seconds):
        taken = {size: [seconds] for size in ("1", "8", "64")}
        return {"seconds": taken, "vectors": [[0.6, 0.8]]}

    rounds = [{"longshore": result(1.0), PEER: result(slow)} for slow in (2.0, 3.0, 9.0)]
    lines = table(rounds)
    assert lines[3] == "| 8 | 8.0 | 1000 ms | 2.7 | 8880 ms | 3.00 |"
    assert lines[-1].endswith("1.000000")
