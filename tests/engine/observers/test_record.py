"""option.record: what an engine does is recorded, and a replay does the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.replay.reproduce import reproduce
from core.sampling import SamplingParams
from engine.observers.frames import Done, Scheduled
from engine.observers.store import read_recording
from engine.offline.llm import LLM
from strategies.speculation.speculation import Speculation

PARAMS = [
    {"temperature": 0},
    {"n": 2, "seed": 1},
    {"num_beams": 2, "n": 2, "temperature": 0},
    {"temperature": 0, "no_repeat_ngram_size": 2},
    {"temperature": 0, "prompt_logprobs": 0},
]


@pytest.mark.parametrize(
    "settings",
    [
        {"batching": "paged", "num_kv_blocks": 12, "block_size": 4, "async_scheduling": True},
        {"batching": "dynamic", "executor": "library"},
        {"batching": "paged", "num_kv_blocks": 20, "block_size": 4, "speculation": "always"},
    ],
    ids=str,
)
def test_an_engine_is_recorded(tiny_model, tmp_path: Path, settings) -> None:
    fields = [f for f in PARAMS if settings["batching"] == "paged" or "prompt_logprobs" not in f]
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9, 4, 3, *range(i)]} for i in range(8)]
    params = [SamplingParams(max_tokens=9, **fields[i % len(fields)]) for i in range(8)]
    record, path = str(tmp_path / "recording"), tiny_model("llama")
    settings = {
        "record": record,
        "receipts": True,
        "max_model_len": 32,
        "dtype": "fp32",
        **settings,
    }
    if "speculation" in settings:  # a model that drafts for itself is mostly right
        settings["speculative_draft_model"] = str(path)
    with LLM(path, **settings) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        extension = llm.llm_engine.strategy.extension
        num_preemptions = llm.llm_engine.strategy.num_preemptions
    recording = read_recording(tmp_path / "recording")
    found = reproduce(recording)
    assert found.difference is None, str(found.difference)
    assert found.num_requests == 8
    steps = [frame for frame in recording.frames if isinstance(frame, Scheduled)]
    assert found.num_steps == len(steps)
    done = [frame for frame in recording.frames if isinstance(frame, Done)]
    assert 0 < sum(frame.model_ns for frame in done) < sum(frame.wall_ns for frame in done)
    assert (extension is not None) == ("speculation" in settings)
    if extension is not None:
        assert isinstance(extension, Speculation)
        assert extension.counts.num_accepted > 0
        answered = [answer.num_tokens for frame in done for answer in frame.answered]
        assert max(answered) > 1, "several tokens of a step"
    elif settings["batching"] == "paged":
        assert steps[-1].num_preemptions > 0
        assert steps[-1].num_preemptions == num_preemptions
