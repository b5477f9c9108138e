"""Measures the host time of one eager step without a GPU: Python's time to launch the kernels.

A tiny random Llama runs on CPU tensors through the Triton wrappers for sm_90. The wrappers check,
allocate and compile as on a GPU, but their launches do nothing. The matmuls, which the CPU
computes here, are timed separately.

Example: OMP_NUM_THREADS=1 python -m tests.kernels.host.host_step --decodes 8 --prompt-tokens 8
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from core import sampling
from core.configuration.kv_layout import KVLayout
from core.plan import BlockTable, Chunk, StepPlan
from core.sequence import Sequence as TokenSequence
from engine.attention.kv_cache import KVCache
from engine.attention.paged_step import PagedStep
from engine.attention.triton_backend import TritonBackend
from engine.model.checkpoint import checkpoint_of
from engine.model.decoder import Decoder
from engine.model.elementwise import make_elementwise
from engine.model.linear import Dense, Stored
from engine.model.loader import Loader
from engine.model.published.settings import read_spec
from engine.model.spec import DecoderSpec
from engine.staging import Staging
from engine.step.step_inputs import InputBuilder, StepInputs
from kernels import dry_run
from kernels.attention.batch import PagedBatch

ARCH = 90
CPU, CUDA, DTYPE = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
BLOCK_SIZE, MAX_MODEL_LEN = 16, 4096
LAYOUT = KVLayout.uniform(BLOCK_SIZE)
DECODE_CONTEXT = 60
"""Context length of each decoding sequence."""
WARM_UP = 3
"""Untimed steps; the first one compiles."""
Spent = dict[str, float]
"""Seconds, by name."""


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one step in seconds."""

    step: float
    products: float
    """Time in torch's matmuls, included in `step`."""

    @property
    def without_products(self) -> float:
        return self.step - self.products


@dataclass(frozen=True, slots=True)
class HostStep:
    """Results of a measurement."""

    num_layers: int
    times: Sequence[Times]
    launches: Mapping[str, int]
    """Launches per step, by kernel."""


class _TimedDense(Dense):
    """Adds the time of its matmul to `spent`."""

    def __init__(self, weight: Tensor, spent: Spent) -> None:
        super().__init__(weight)
        self._spent = spent

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        begin = time.perf_counter()
        # Only C++ takes biases in fp32.
        outputs = super().multiply(rows, None if bias is None else bias.to(rows.dtype))
        self._spent["products"] += time.perf_counter() - begin
        return outputs


class _Loader(Loader):
    """Builds modules on the CPU that use Triton wrappers and torch's matmuls, as on a GPU."""

    def __init__(self, spec: DecoderSpec, state: Mapping[str, Tensor], spent: Spent) -> None:
        readers = {name: partial(state.__getitem__, name) for name in state}
        super().__init__(checkpoint_of(readers, spec.family, "random weights"), CPU, DTYPE)
        self.elementwise = make_elementwise(CUDA)
        self._spent = spent

    def format(self, parts: Sequence[Stored], dtype: torch.dtype | None = None) -> Dense:
        dense = [part for part in parts if isinstance(part, Tensor)]
        return _TimedDense(Dense.of(dense, CPU, dtype or DTYPE).weight, self._spent)


class _Model:
    """A decoder, its KV cache, and the inputs of one step."""

    def __init__(self, num_layers: int, num_decodes: int, num_prompt_tokens: int) -> None:
        config = _config(num_layers)
        state = AutoModelForCausalLM.from_config(config, dtype=DTYPE).state_dict()
        spec = read_spec(config, MAX_MODEL_LEN)
        self._spent: Spent = defaultdict(float)
        self._decoder = Decoder(_Loader(spec, state, self._spent), spec, num_layers)
        self._inputs = _inputs(num_decodes, num_prompt_tokens)
        num_blocks = 1 + int(self._inputs.batch.block_tables.max())
        cache = KVCache(spec.shapes, num_blocks, LAYOUT, DTYPE, CPU)
        backend = TritonBackend(dry_run.NUM_PROCESSORS[ARCH], MAX_MODEL_LEN)
        # A new batch each step, so that the time includes work whose result the backend caches.
        self._paged = lambda: PagedStep((self._new_batch(),), cache, backend)

    def _new_batch(self) -> PagedBatch:
        batch = self._inputs.batch
        return replace(batch, context_lens=batch.context_lens.view(-1))

    def step(self) -> Times:
        self._spent.clear()
        tokens, rows = self._inputs.tokens, self._inputs.logit_rows
        begin = time.perf_counter()
        self._decoder(tokens[0], tokens[1], rows, self._paged())
        return Times(time.perf_counter() - begin, self._spent["products"])


def measure(num_layers: int, num_decodes: int, num_prompt_tokens: int, repeats: int) -> HostStep:
    with dry_run.idle_gpu(ARCH), torch.inference_mode():
        model = _Model(num_layers, num_decodes, num_prompt_tokens)
        for _ in range(WARM_UP):
            model.step()
        with dry_run.target(ARCH) as recorded:
            model.step()
        launches = Counter(launch.name for launch in recorded)
        times = [model.step() for _ in range(repeats)]
        return HostStep(num_layers, times, launches)


def _config(num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=False,
    )


def _inputs(num_decodes: int, num_prompt_tokens: int) -> StepInputs:
    """Build the inputs of decoding sequences, and of one prompt if it has tokens."""
    chunks: list[Chunk] = []
    lengths = [DECODE_CONTEXT] * num_decodes + [num_prompt_tokens] * (num_prompt_tokens > 0)
    num_blocks = 0
    for id, length in enumerate(lengths):
        sequence = TokenSequence(id, [1] * length, sampling.SamplingParams())
        start = length - 1 if id < num_decodes else 0
        end_block = num_blocks + -(-length // BLOCK_SIZE)
        table = BlockTable(tuple(range(num_blocks, end_block)))
        chunks.append(Chunk(sequence, start, length - start, (table,), samples_token=True))
        num_blocks = end_block
    return InputBuilder(LAYOUT.groups, Staging(CPU)).build(StepPlan(tuple(chunks)))


def report(result: HostStep) -> str:
    layers = result.num_layers
    without_products = [times.without_products for times in result.times]
    lines = [f"{'milliseconds':30}{'median':>9}{'minimum':>9}"]
    for label, seconds in (
        ("step", [times.step for times in result.times]),
        ("  matrix products", [times.products for times in result.times]),
        ("  without products", without_products),
        ("  without products, per layer", [seconds / layers for seconds in without_products]),
    ):
        lines.append(f"{label:30}{median(seconds) * 1e3:9.3f}{min(seconds) * 1e3:9.3f}")
    total = sum(result.launches.values())
    lines.append(f"\nkernel launches: {total / layers:.2f} per layer")
    lines += [f"  {name:28}{count / layers:8.2f}" for name, count in result.launches.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    print(report(measure(options.layers, options.decodes, options.prompt_tokens, options.repeats)))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kernels.host.host_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=32, help="number of layers (default: 32)")
    parser.add_argument("--decodes", type=int, default=8, help="number of decodes (default: 8)")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=8,
        help="tokens of one prompt in the step; 0 for no prompt (default: 8)",
    )
    parser.add_argument(
        "--repeats", type=int, default=50, help="number of timed steps (default: 50)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
