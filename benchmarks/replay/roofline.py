"""The cost of a step on a machine from its data sheet: a roofline, plus a fixed overhead.

```
seconds = max(bytes / bandwidth, FLOPs / (FLOP/s)) + sums + overhead
bytes   = all weights once, and K and V of every token attended to
FLOPs   = 2 per parameter and token, and 4 per layer, channel and query-key pair
sums    = (2 per layer + 1 for the embedding) × (latency + sent / link)
sent    = 2 (N - 1) / N × hidden size × tokens, in 16 bits: what each GPU sends in a ring
```

Tensor parallelism on N GPUs has N times the memory, bandwidth and FLOP/s of one. Ranks sum their
parts of the hidden states, and no computation overlaps with these sums. Gathering the logits is
left out.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
BYTES_PER_VALUE = 2
"""Weights, K and V are fp16 or bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The properties of a dense decoder that determine its memory traffic and FLOPs."""

    name: str
    num_parameters: float
    num_layers: int
    attention_width: int
    """Query heads times head dim; for all models here also the hidden size."""
    kv_width: int
    """KV heads times head dim."""

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * BYTES_PER_VALUE

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.kv_width * BYTES_PER_VALUE


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Data sheet figures of a GPU."""

    name: str
    memory_gib: float
    bandwidth: float
    """Bytes per second."""
    flops: float
    """FLOP/s of dense bf16 matmuls on tensor cores."""
    link: float
    """Bytes per second that it can send to the other GPUs of its machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Achieved share of the data sheet figures. The defaults are assumptions."""

    bandwidth: float = 0.8
    flops: float = 0.6
    overhead_s: float = 0.003
    """Fixed seconds per step for host work, launches and sampling, independent of the batch."""
    link: float = 0.7
    sum_s: float = 20e-6
    """Fixed seconds of a sum over the GPUs of a machine, independent of its size."""


class Hardware:
    """One machine: a model on one or more GPUs."""

    def __init__(
        self,
        model: ModelShape,
        gpu: Gpu,
        num_gpus: int = 1,
        efficiency: Efficiency | None = None,
        memory_utilization: float = 0.9,
    ) -> None:
        """memory_utilization: share of GPU memory for weights and KV cache, 0.9 as in vLLM."""
        self.model, self.gpu, self.num_gpus = model, gpu, num_gpus
        self.efficiency = efficiency or Efficiency()
        usable = num_gpus * gpu.memory_gib * GIB * memory_utilization
        self.num_kv_tokens = int((usable - model.weight_bytes) // model.kv_bytes_per_token)
        """Token slots of the KV cache; zero or negative if the weights leave no room."""
        bandwidth = num_gpus * gpu.bandwidth * self.efficiency.bandwidth
        flops = num_gpus * gpu.flops * self.efficiency.flops
        self._weights_s = model.weight_bytes / bandwidth
        self._kv_token_s = model.kv_bytes_per_token / bandwidth
        self._token_s = 2 * model.num_parameters / flops
        self._pair_s = 4 * model.num_layers * model.attention_width / flops
        sent = 2 * (num_gpus - 1) / num_gpus * model.attention_width * BYTES_PER_VALUE
        self._num_sums = 2 * model.num_layers + 1 if num_gpus > 1 else 0
        self._sum_token_s = sent / (gpu.link * self.efficiency.link)

    @property
    def name(self) -> str:
        gpus = self.gpu.name if self.num_gpus == 1 else f"{self.num_gpus} x {self.gpu.name}"
        return f"{self.model.name} on {gpus}"

    def step_s(self, num_tokens: int, num_pairs: int, num_kv_tokens: int) -> float:
        """Return the seconds of a step that computes `num_tokens` tokens.

        num_pairs: query-key pairs, including each token with itself. num_kv_tokens: sum of the
        sequences' context lengths.
        """
        memory_s = self._weights_s + self._kv_token_s * num_kv_tokens
        compute_s = self._token_s * num_tokens + self._pair_s * num_pairs
        return max(memory_s, compute_s) + self.sums_s(num_tokens) + self.efficiency.overhead_s

    def sums_s(self, num_tokens: float) -> float:
        """Return the seconds in which the GPUs sum the hidden states of `num_tokens` tokens."""
        return self._num_sums * (self.efficiency.sum_s + self._sum_token_s * num_tokens)


def _opt(name: str, num_layers: int, width: int) -> ModelShape:
    """Return a model of the OPT paper's table 1 (arXiv 2205.01068).

    The embeddings cover 50,272 tokens and 2,050 positions. Biases and norms, about 0.1 % of the
    parameters, are left out.
    """
    return ModelShape(
        name=name,
        num_parameters=12 * num_layers * width**2 + (50_272 + 2_050) * width,
        num_layers=num_layers,
        attention_width=width,
        kv_width=width,
    )


MODELS = {
    model.name: model
    for model in (
        ModelShape(  # the Llamas are from their config.json, as in benchmarks/gpu/shapes.py
            name="llama-2-7b",
            num_parameters=6.738e9,
            num_layers=32,
            attention_width=4096,
            kv_width=4096,
        ),
        ModelShape(
            name="llama-3.1-8b",
            num_parameters=8.030e9,
            num_layers=32,
            attention_width=4096,
            kv_width=1024,
        ),
        _opt("opt-13b", 40, 5120),
        _opt("opt-66b", 64, 9216),
        _opt("opt-175b", 96, 12288),
    )
}
GPUS = {
    gpu.name: gpu
    for gpu in (
        # From NVIDIA's data sheets: SXM versions of A100, H100 and H200. Memory in "GB" means GiB.
        # Links: NVLink in one direction; PCIe 4.0 x16 for A10G and L40S.
        Gpu(name="a10g", memory_gib=24, bandwidth=600e9, flops=70e12, link=32e9),
        Gpu(name="a100-40gb", memory_gib=40, bandwidth=1555e9, flops=312e12, link=300e9),
        Gpu(name="a100-80gb", memory_gib=80, bandwidth=2039e9, flops=312e12, link=300e9),
        Gpu(name="l40s", memory_gib=48, bandwidth=864e9, flops=362e12, link=32e9),
        Gpu(name="h100", memory_gib=80, bandwidth=3350e9, flops=989e12, link=450e9),
        Gpu(name="h200", memory_gib=141, bandwidth=4800e9, flops=989e12, link=450e9),
    )
}
