"""What the server does with receipts."""

from __future__ import annotations

import pytest

from core.protocol.messages import Submit
from engine.observers.ledger import Ledger
from tests.engine.serve.serving import greedy
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
