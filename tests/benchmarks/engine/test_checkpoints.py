"""The benchmark of checkpoints runs, with checkpoints on the device and on the host."""

from __future__ import annotations

import json

import pytest

from benchmarks.engine import checkpoints
from benchmarks.engine.checkpoints import measure, places

SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2}


def test_large_slots_are_measured_on_the_host_too():
    assert places("lfm2", [0, 8]) == [(0, 0), (8, 0)]
    assert places("qwen3_5", [0, 1, 8]) == [(0, 0), (1, 0), (8, 0), (1, 7)]


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize(("place", "finds"), [((0, 0), False), ((8, 0), True), ((1, 15), True)])
def test_a_row_says_how_many_tokens_are_found(monkeypatch, tmp_path, place, finds):
    model = checkpoints.MODELS["qwen3_5"] | SMALL

    def two_turns(engine, rng):
        prompts = [checkpoints.tokens(rng, 20) for _ in range(6)]
        for prompt in prompts * 2:
            seconds, answer = checkpoints.first_token(engine, prompt)
            prompt += answer
            yield seconds

    monkeypatch.setattr(checkpoints, "MODELS", {"tiny": model})
    monkeypatch.setattr(checkpoints, "WORKLOADS", {"two turns": two_turns})
    monkeypatch.setattr(checkpoints, "NUM_ANSWER", 2)
    (tmp_path / "config.json").write_text(json.dumps(model))
    row = [part.strip() for part in measure(tmp_path, "tiny", "two turns", *place).split("|")[1:-1]]
    assert row[:3] == ["two turns", *map(str, place)]
    assert (float(row[3].rstrip("%")) > 0) == finds
