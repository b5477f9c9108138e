"""What the server does with receipts."""

from __future__ import annotations

import pytest

from core.protocol.messages import Abort, Charged, Step, Submit
from core.sampling import SamplingParams
from engine.observers.ledger import Ledger
from tests.engine.serve.serving import greedy, until
from tests.engine.serve.test_server_figures import stats_when


@pytest.fixture
def engine(engine):
    ledger = Ledger(engine.strategy)
    engine.features = (*engine.features, ledger)
    engine.observer = ledger
    return engine


def test_metrics_have_totals_by_api_key(client):
    for id, key in (("a", "ours"), ("b", "ours"), ("c", "")):
        client.send(Submit(id, [1, 2, 3], greedy(2), api_key=key))
        client.answer(id)
    stats = stats_when(client, lambda stats: stats.finished.get("length") == 3)
    totals = {total.name: total.values for total in stats.totals if total.label == "api_key"}
    assert totals["longshore:api_key_requests"] == {"ours": 2}
    assert totals["longshore:api_key_compute_seconds"]["ours"] > 0


def test_an_abort_at_a_stop_string_is_answered_with_the_receipt(client, engine, gate, connection):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    gate.open.clear()
    for id in ("a", "b"):
        client.send(Submit(id, [1, 2, 3], params))
    until(lambda: engine.strategy.running)
    client.send(Abort("a", None, "disconnect"))
    client.send(Abort("b", None, "stop_string"))
    strategy = engine.strategy
    until(lambda: connection.inbox.qsize() + len(strategy.running) + len(strategy.waiting) == 4)
    gate.open.set()
    charged = client.receive(Charged)
    assert charged.id == "b"
    assert charged.receipt.queued_ns.keys() == {"step"}


def test_a_receipt_comes_with_the_last_answer(client, gate):
    """At a stop string or not, the request goes on while it has others."""
    gate.open.clear()
    client.send(Submit("a", [1, 2, 3], SamplingParams(max_tokens=3, n=2, ignore_eos=True)))
    client.send(Abort("a", 0, "stop_string"))
    gate.open.set()
    until(lambda: client.receive(Step).outputs[-1][1].receipt is not None)
