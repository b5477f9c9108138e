"""A Bench for tests of sections at their real sizes, without a GPU."""

from __future__ import annotations

import torch

from benchmarks.bench import Bench

H200_BYTES = 130 * 2**30


class PretendBench(Bench):
    """Pretends to run on a GPU with 130 GiB where everything takes a microsecond."""

    num_processors = 132

    def __init__(self, events):
        super().__init__(is_dry=False, use_flashinfer=False, seconds=1e6, emit=events.append)
        self.device = torch.device("meta")

    def num_sets(self, num_bytes, max_sets=64):
        return min(max_sets, max(1, 2**28 // num_bytes))

    def fits(self, num_bytes, what):
        assert num_bytes < H200_BYTES, what
        return True

    def time_us(self, calls):
        calls[0]()
        return 1.0

    def time_eager_us(self, call):
        return self.time_us([call])
