"""The real engine with a fake executor and a clock that advances one second per step."""

from __future__ import annotations

from core.protocol.facts import Facts
from engine.engine import Engine
from strategies.base import Strategy
from tests.strategies.fakes import VOCABULARY, FakeExecutor, strategy_of

BLOCK_SIZE = 4


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class TickingExecutor(FakeExecutor):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__(BLOCK_SIZE)
        self._clock = clock

    def run(self, plan, between_tokens=None):
        self._clock.now += 1.0
        return super().run(plan)


class LateEngine(Engine):
    """Returns a step's outputs from the next call of `step`, as if steps overlapped."""

    def __init__(self, strategy, executor, facts) -> None:
        super().__init__(strategy, executor, facts)
        self._late = []
        self._is_under_way = False

    def has_work(self) -> bool:
        return super().has_work() or self._is_under_way

    def abort(self, request_id, index=None) -> None:
        super().abort(request_id, index)
        self._late = [output for output in self._late if output.request_id != request_id]

    def step(self, now, between_tokens=lambda: None):
        self._is_under_way = super().has_work()
        outputs, self._late = self._late, super().step(now, between_tokens)
        return outputs


def ticking_engine(
    clock: FakeClock, batching: str, kind: type[Engine] = Engine, **changes
) -> Engine:
    """changes: passed to tests.strategies.fakes.strategy_of."""
    strategy: Strategy = strategy_of(batching, **changes)
    facts = Facts(
        model="",
        architecture="",
        batching=batching,
        batching_reason="",
        executor="packed",
        executor_reason="",
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        max_model_len=48,
        max_sequences=strategy.limits.max_sequences,
        max_step_tokens=strategy.limits.max_step_tokens,
        block_size=BLOCK_SIZE,
        num_kv_blocks=strategy.memory.num_blocks,
        weights_bytes=0,
        kv_bytes=0,
        vocab_size=VOCABULARY,
        eos_token_ids=(0,),
        load_seconds=0.0,
    )
    return kind(strategy, TickingExecutor(clock), facts)
