"""transformers' own batching, with fake models and managers that record their calls."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.engine import generate
from benchmarks.load.workload import Request
from tests.benchmarks.engine.ticking_engine import FakeClock

FOREVER = float("inf")


@pytest.fixture
def clock():
    return FakeClock()


class FakeModel:
    """Takes one second per token."""

    device = torch.device("cpu")

    def __init__(self, clock):
        self.calls = []
        self._clock = clock

    def generate(self, *, input_ids, attention_mask, generation_config):
        self.calls.append((input_ids.tolist(), attention_mask.tolist()))
        assert generation_config.eos_token_id is None
        self._clock.now += generation_config.max_new_tokens
        answers = torch.ones(len(input_ids), generation_config.max_new_tokens, dtype=torch.int64)
        return torch.cat([input_ids, answers], 1)


def serve_padded(clock, requests, seconds=FOREVER, clients=2):
    model = FakeModel(clock)
    with generate.padded_batches(model, clients, clock) as serve:
        return model, serve(requests, seconds)


def test_a_batch_is_padded_on_the_left_and_run_to_the_longest_answer(clock):
    model, journal = serve_padded(clock, [Request([7, 8, 9], 2), Request([5], 4)])
    assert model.calls == [([[7, 8, 9], [0, 0, 5]], [[1, 1, 1], [0, 0, 1]])]
    assert [record.arrivals for record in journal.records] == [[(4.0, 2)], [(4.0, 4)]]
    assert journal.figures()["tokens/s"] == round(6 / 4)
    assert journal.figures()["TTFT ms"]["mean"] == 4000
    assert journal.figures()["ITL ms"]["mean"] is None


def test_padding_is_held_and_not_filled(clock):
    _, journal = serve_padded(clock, [Request([7, 8, 9], 2), Request([5], 4)])
    assert journal.held == [6, 8, 10, 12]
    assert journal.filled == [4, 6, 8, 9]


@pytest.mark.parametrize(("seconds", "num_batches"), [(1, 1), (7, 1), (8, 2), (12, 3), (99, 4)])
def test_a_batch_starts_only_if_it_would_end_in_time(clock, seconds, num_batches):
    model, journal = serve_padded(clock, [Request([1], 4)] * 7, seconds)
    assert len(model.calls) == num_batches
    assert journal.end == 4 * num_batches
    assert journal.records[-1].submitted == 4 * (num_batches - 1)


class FakeManager:
    """Streams a token to every running request each second."""

    def __init__(self, clock, error=None, is_alive=True):
        self.cancelled = []
        self.most = 0
        self._clock = clock
        self._running = {}
        self._results = deque()
        self._error = error
        self._is_alive = is_alive

    def add_request(self, prompt, *, max_new_tokens, streaming):
        assert streaming
        request_id = f"req_{len(self._running)}"
        self._running[request_id] = (max_new_tokens, [])
        return request_id

    def get_result(self, timeout):
        if not self._is_alive:
            return None
        if not self._results:
            self._clock.now += 1
            self.most = max(self.most, sum(len(t) < most for most, t in self._running.values()))
            for request_id, (most, tokens) in self._running.items():
                if len(tokens) < most:
                    tokens.append(1)
                    self._results.append((request_id, tokens[:]))
        request_id, tokens = self._results.popleft()
        return SimpleNamespace(request_id=request_id, generated_tokens=tokens, error=self._error)

    def cancel_request(self, request_id):
        self.cancelled.append(request_id)

    def is_running(self):
        return self._is_alive


def test_a_client_sends_its_next_request_after_an_answer(clock):
    manager = FakeManager(clock)
    journal = generate.ManagerLoop(manager, 2, clock).run([Request([1], 2)] * 5, FOREVER)
    assert manager.most == 2
    assert [record.arrivals for record in journal.records[:3]] == [
        [(1, 1), (2, 1)], [(1, 1), (2, 1)], [(3, 1), (4, 1)],
    ]  # fmt: skip
    assert journal.figures()["requests"] == 5.0
    assert manager.cancelled == []


def test_running_requests_are_cancelled_when_time_is_up(clock):
    manager = FakeManager(clock)
    journal = generate.ManagerLoop(manager, 2, clock).run([Request([1], 4)] * 5, 3.0)
    assert manager.cancelled == ["req_0", "req_1"]
    assert journal.end == 3.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"error": "out of memory"}, "out of memory"), ({"is_alive": False}, "thread is not running")],
)
def test_a_manager_that_fails_is_an_error(clock, settings, message):
    loop = generate.ManagerLoop(FakeManager(clock, **settings), 2, clock)
    with pytest.raises(RuntimeError, match=message):
        loop.run([Request([1], 4)], FOREVER)
