"""One model under two strategies at a time, end to end."""

from __future__ import annotations

import json
import signal

from tests.container.processes import descendants, is_gone
from tests.e2e.serving import serve

ASK = {"prompt": "ROMEO:", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def test_two_strategies_answer_alike_and_show_what_they_do(tmp_path):
    properties = "option.dtype=fp32\noption.batching=dynamic\nbatch_size=4\n"
    flags = ["--strategies", "none,paged", "--max-model-len", "256"]
    with serve(tmp_path, properties, flags=flags) as container:
        assert b"ui/compare.js" in container.request("GET", "/")[1]
        listed = json.loads(container.request("GET", "/models")[1])["models"]
        assert [entry["modelName"] for entry in listed] == ["none", "paged"]
        container.wait_for_log("[paged]   warning: batch_size has no effect with paged")
        texts = set()
        for name in ("none", "paged"):
            with container.events(f"/models/{name}/ui/events") as events:
                kind, about = next(events)
                assert (kind, about["batching"], about["max_model_len"]) == ("engine", name, 256)
                next(data for kind, data in events if kind == "snapshot")
                path = f"/models/{name}/v1/completions"
                status, data = container.request("POST", path, {"model": name, **ASK})
                assert status == 200, data
                texts.add(json.loads(data)["choices"][0]["text"])
                ended = (
                    sequence
                    for kind, data in events
                    if kind == "snapshot"
                    for sequence in data["snapshot"]["ended"]
                )
                assert len(next(ended)["timing"]) == 4
        assert len(texts) == 1, "the strategies compute the same tokens"
        status, data = container.request("POST", "/v1/completions", ASK)
        assert (status, b"/models/NAME" in data) == (400, True), data
        pids = descendants(container.process.pid)
        assert container.stop(signal.SIGINT) == 0
        assert all(map(is_gone, pids))
