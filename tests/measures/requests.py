"""One streamed text request: through the front end before a fake engine, and through the engine."""

from __future__ import annotations

import tempfile
import time

from tests.measures.trace import Function, Trace
from tests.measures.tree import ROOT

MODEL = ROOT / "models" / "demo"
PROMPT = "Once upon a time"


def front_end() -> list[Function]:
    """Return the functions of the front end that run for a streamed request to /invocations."""
    import gevent
    import msgspec

    from container.front_end.app import create_app
    from container.wire.engine_client import EngineClient
    from core.configuration.options import Options
    from core.text.tokenizer import Tokenizer
    from tests.container.fake_engine import FACTS, FakeEngine, says

    trace = Trace()
    tokenizer = Tokenizer(MODEL)
    facts = msgspec.structs.replace(FACTS, vocab_size=2**16)
    answer = [
        *tokenizer.encode(" there was a fox.", add_special_tokens=False),
        FACTS.eos_token_ids[0],
    ]
    with tempfile.TemporaryDirectory(prefix="ls-") as folder:
        engine = FakeEngine(f"ipc://{folder}/engine.sock", says(answer), facts=facts)
        trace.install()
        client = EngineClient(engine.endpoint, heartbeat_timeout_s=60)
        http = create_app(client, tokenizer, Options(), "demo").test_client()
        deadline = time.monotonic() + 60
        while not client.health().healthy and time.monotonic() < deadline:
            gevent.sleep(0.005)
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8}, "stream": True}
        _ = http.post("/invocations", json=body).data  # what only the first request does
        trace.start()
        response = http.post("/invocations", json=body)
        last = response.data.splitlines()[-1]
        trace.stop()
        assert response.status_code == 200, response.data
        assert b"generated_text" in last, last
        client.close()
        engine.close()
    return trace.functions()


def engine() -> list[Function]:
    """Return the functions of the engine that run for a request on a CPU, without a server."""
    from core.sampling import SamplingParams
    from engine import LLM

    trace = Trace()
    with LLM(MODEL, batching="paged", device="cpu") as llm:
        params = SamplingParams(max_tokens=8, temperature=0)
        list(llm.stream(PROMPT, params))
        trace.install()
        trace.start()
        num_deltas = sum(1 for _ in llm.stream(PROMPT, params))
        trace.stop()
        assert num_deltas > 1
    return trace.functions()
