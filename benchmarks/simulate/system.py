"""The systems that are compared, each as a strategy with its memory and its executor."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.memory.usage import make
from benchmarks.simulate.cost import Hardware
from benchmarks.simulate.executor import Executor, PackedExecutor, PaddedExecutor
from benchmarks.simulate.machine import Machine
from benchmarks.simulate.tally import Tally
from core.options import Batching, KVReservation
from strategies.base import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    name: str
    batching: Batching
    kv_reservation: KVReservation = "oracle"
    is_padded: bool = False
    """Whether a gang is as many requests as could all be of the greatest length, padded."""


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
    """What all systems have in common."""

    hardware: Hardware
    max_length: int = 2048
    """Tokens of the longest sequence, prompt and answer; what `max` reserves."""
    max_sequences: int = 256
    max_step_tokens: int = 2048
    caches_prefixes: bool = False

    def machine(self, system: System, tally: Tally, *, leaps: bool = True) -> Machine:
        """Raises ValueError where not one sequence of the greatest length fits."""
        most_longest = self.hardware.num_kv_tokens // self.max_length
        if most_longest < 1:
            raise ValueError(
                f"{self.hardware.name}: room for {max(0, self.hardware.num_kv_tokens)} tokens of "
                f"K/V, less than one sequence of {self.max_length}; take more GPUs"
            )
        executor: Executor = PackedExecutor(self.hardware)
        limits = Limits(max_sequences=self.max_sequences, max_step_tokens=self.max_step_tokens)
        if system.is_padded:
            executor = PaddedExecutor(self.hardware)
            count = min(most_longest, self.max_sequences)
            limits = Limits(max_sequences=count, max_step_tokens=count * self.max_length)
        strategy = make(
            system.batching,
            self.hardware.num_kv_tokens,
            self.max_length,
            limits=limits,
            kv_reservation=system.kv_reservation,
            enable_prefix_caching=self.caches_prefixes,
        )
        return Machine(strategy, self.hardware, tally, executor, leaps=leaps)
