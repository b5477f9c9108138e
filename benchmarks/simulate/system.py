"""The systems to compare: each is a strategy with a memory manager and an executor."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.memory.usage import make
from benchmarks.simulate.cost import Hardware
from benchmarks.simulate.executor import Executor, SimulatedPackedExecutor, SimulatedPaddedExecutor
from benchmarks.simulate.machine import Machine
from benchmarks.simulate.tally import Tally
from core.configuration.strategy_table import Batching, KVReservation
from strategies.base import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    name: str
    batching: Batching
    kv_reservation: KVReservation = "oracle"
    is_padded: bool = False
    """Whether batches are padded and sized so that all requests may have the maximum length."""


SYSTEMS = {
    "fastertransformer": System(name="FasterTransformer-like", batching="dynamic", is_padded=True),
    "none": System(name="none (ours)", batching="none"),
    "dynamic": System(name="dynamic (ours)", batching="dynamic"),
    "orca-max": System(name="Orca (Max)", batching="continuous", kv_reservation="max"),
    "orca-pow2": System(name="Orca (Pow2)", batching="continuous", kv_reservation="pow2"),
    "orca-oracle": System(name="Orca (Oracle)", batching="continuous"),
    "paged": System(name="paged", batching="paged"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings shared by all systems."""

    hardware: Hardware
    max_length: int = 2048
    """Maximum tokens of prompt and output; kv_reservation `max` reserves that many."""
    max_sequences: int = 256
    max_step_tokens: int = 2048
    caches_prefixes: bool = False

    def machine(self, system: System, tally: Tally) -> Machine:
        """Build a machine. Raises ValueError if no sequence of the maximum length fits."""
        max_full_length = self.hardware.num_kv_tokens // self.max_length
        if max_full_length < 1:
            raise ValueError(
                f"{self.hardware.name}: the KV cache has room for "
                f"{max(0, self.hardware.num_kv_tokens)} tokens, less than one sequence of "
                f"{self.max_length}; use more GPUs"
            )
        executor: Executor = SimulatedPackedExecutor(self.hardware)
        limits = Limits(max_sequences=self.max_sequences, max_step_tokens=self.max_step_tokens)
        if system.is_padded:
            executor = SimulatedPaddedExecutor(self.hardware)
            count = min(max_full_length, self.max_sequences)
            limits = Limits(max_sequences=count, max_step_tokens=count * self.max_length)
        strategy = make(
            system.batching,
            self.hardware.num_kv_tokens,
            self.max_length,
            limits=limits,
            kv_reservation=system.kv_reservation,
            enable_prefix_caching=self.caches_prefixes,
        )
        return Machine(strategy, tally, executor)
