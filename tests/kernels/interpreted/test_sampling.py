"""Sampling with Triton's kernels keeps and draws the same tokens as with torch, ties included."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.sampling import draw, filters, triton_draw
from engine.sampling.kernels import make_sampling_kernels
from engine.sampling.rows import Row, integers
from engine.sampling.sampler import Sampler
from engine.staging import Staging, Upload
from kernels.sampling import best_tokens, candidates, draw_tokens, filter_limits, torch_logits
from kernels.sampling.token_weights import DrawnRows
from tests.engine.sampling.stages import STAGES

# numpy warns of what a GPU computes silently: -inf * 0, 0 / 0, log(0), exp of a large number.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
INF, NAN = float("inf"), float("nan")
CHUNK = 256
"""Tokens per program: few in these tests, so that short rows have several chunks."""
WIDTH = 2 * CHUNK + 9
FILTERS = [
    {},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 2},
    {"top_k": 64},
    {"top_k": 65},
    {"top_k": 4000},
    {"top_k": 10**9},
    {"top_p": 1e-50},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"top_p": 1 - 2**-53},
    {"typical_p": 1e-50},
    {"typical_p": 0.3},
    {"typical_p": 0.95},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 500, "top_p": 0.5},
    {"min_p": 0.1, "top_k": 30},
    {"min_p": 0.05, "top_p": 0.7},
    {"top_k": 50, "typical_p": 0.7},
    {"top_p": 0.9, "typical_p": 0.5},
    {"min_p": 0.01, "top_k": 100, "top_p": 0.95, "typical_p": 0.8},
]
TEMPERATURES = (1.0, 0.3, 1.7)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    for module in (candidates, draw_tokens):
        monkeypatch.setattr(module, "CHUNK", CHUNK)
    monkeypatch.setattr(filter_limits, "TILE", CHUNK)


def noise(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def with_holes(logits):
    """Forbid three quarters of the tokens, as a grammar does."""
    return logits.masked_fill(noise(*logits.shape, seed=1) < 0.6, -INF)


KINDS = {
    "flat": lambda count, width: noise(count, width) * 0.1,
    "spread": lambda count, width: noise(count, width) * 3,
    "peaked": lambda count, width: noise(count, width) * 20,
    "ties": lambda count, width: noise(count, width).round(),
    "equal": lambda count, width: torch.full((count, width), -2.5),
    "holes": lambda count, width: with_holes(noise(count, width) * 3),
    "one left": lambda count, width: torch.full((count, width), -INF).index_fill_(
        1, torch.tensor([width // 2]), 1.0
    ),
    "tiny": lambda count, width: noise(count, width) * 1e-38,
    "cliff": lambda count, width: (noise(count, width) > 0) * 30.4,
}


def sequences(changes=FILTERS):
    """Return a sequence per set of filters, each with a seed and a temperature."""
    return [
        Sequence(id, [1, 2], SamplingParams(seed=id, temperature=temperature, **params))
        for id, (params, temperature) in enumerate(zip(changes, itertools.cycle(TEMPERATURES)))
    ]


def rows_of(batch):
    return [Row(sequence, len(sequence.token_ids)) for sequence in batch]


def sample(logits, batch, device):
    """Sample with the kernels of a device."""
    sampler = Sampler(Staging(CPU), STAGES, kernels=make_sampling_kernels(device))
    newest = torch.tensor([sequence.token_ids[-1] for sequence in batch])
    return sampler.sample(logits, rows_of(batch), lambda: newest)


class Spy:
    """Records the names of the sampling parameters that are read."""

    def __init__(self):
        self.names = set()

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(SamplingParams(), name)


def test_both_read_the_same_parameters():
    """A filter that only torch had would have no effect on CUDA."""
    read = {}
    for module in (draw, triton_draw):
        spy = Spy()
        module.plan_draws([SimpleNamespace(params=spy, num_tokens=1)], WIDTH, Upload(Staging(CPU)))
        read[module] = spy.names
    assert read[triton_draw] == read[draw], "engine/sampling/triton_draw.py"
    tested = {name for params in FILTERS for name in params}
    assert read[draw] - {"is_greedy", "temperature", "seed"} == tested, "add values to FILTERS"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    mixed = sequences(FILTERS[::3])
    logits = KINDS["spread"](len(mixed), WIDTH).to(dtype)
    check_sampling(logits, mixed)


def check_sampling(logits, batch):
    expected, got = (sample(logits, batch, device) for device in (CPU, CUDA))
    assert torch.equal(got.token_ids, expected.token_ids)
    torch.testing.assert_close(got.logprobs, expected.logprobs, equal_nan=True)


def drawn_rows_of(batch):
    upload = Upload(Staging(CPU))
    names = {"temperature": np.float32, "min_p": np.float32, "top_p": None, "typical_p": None}
    columns = {
        name: upload.put(np.array([getattr(sequence.params, name) for sequence in batch], dtype))
        for name, dtype in names.items()
    }
    columns["row_index"] = upload.put(np.arange(len(batch)))
    columns["top_k"] = upload.put(
        integers([min(sequence.params.top_k, 2**31) for sequence in batch])
    )
    upload.send()
    return DrawnRows(**{name: column.tensor for name, column in columns.items()})


def kept_by_torch(logits, batch):
    """Return [N, vocabulary] bool: the tokens that have a weight."""
    upload = Upload(Staging(CPU))
    keeps = filters.plan_filters(rows_of(batch), logits.shape[1], upload)
    upload.send()
    temperature = torch.tensor([[sequence.params.temperature] for sequence in batch])
    scores = (logits - logits.amax(1, keepdim=True)) / temperature
    weights = filters.weigh(scores)
    for keep in keeps:
        keep(scores, weights)
    return weights > 0


def limits_of(logits, token_ids, drawn_rows):
    found = candidates.collect_candidates(logits, token_ids, drawn_rows)
    return filter_limits.filter_limits(found, drawn_rows)


def kept_by_triton(logits, batch):
    """Apply the limits that the kernel found, and min-p."""
    drawn_rows = drawn_rows_of(batch)
    limits = limits_of(logits, logits.argmax(1), drawn_rows)
    scores = (logits - logits.amax(1, keepdim=True)) / drawn_rows.temperature[:, None]
    distances = scores - limits.mean_score[:, None]
    kept = filters.weigh(scores) > 0
    kept &= scores.exp() >= drawn_rows.min_p[:, None]
    kept &= (scores.view(torch.int32) & 0x7FFFFFFF) <= limits.max_score_key[:, None]
    return kept & ((distances.view(torch.int32) & 0x7FFFFFFF) <= limits.max_distance_key[:, None])


@pytest.mark.parametrize("kind", KINDS)
def test_keeps_and_draws_the_tokens_of_torch(kind):
    mixed = sequences()
    logits = KINDS[kind](len(mixed), WIDTH)
    expected, got = kept_by_torch(logits, mixed), kept_by_triton(logits, mixed)
    differs = (expected != got).any(1).nonzero()[:, 0].tolist()
    assert not differs, [mixed[row].params for row in differs]
    assert kind in ("one left", "equal") or len({*expected.sum(1).tolist()}) > 1
    check_sampling(logits[::3], mixed[::3])


@pytest.mark.parametrize(
    ("width", "kind"),
    [(1, "ties"), (CHUNK - 1, "ties"), (CHUNK, "ties"), *((7, kind) for kind in KINDS)],
)
def test_other_widths(width, kind):
    mixed = sequences(FILTERS[::4])
    check_sampling(KINDS[kind](len(mixed), width), mixed)


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("seed", range(4))
def test_random_parameters_and_logits(seed):
    rng = np.random.default_rng(seed)
    width = int(rng.integers(2, WIDTH))
    changes = [
        {
            "min_p": float(rng.choice([0.0, rng.random() ** 4])),
            "top_k": int(rng.choice([0, rng.integers(2, width + 2), rng.integers(2, 70)])),
            "top_p": float(rng.choice([1.0, 1 - rng.random() ** 3])),
            "typical_p": float(rng.choice([1.0, 1 - rng.random() ** 2])),
        }
        for _ in range(12)
    ]
    mixed = sequences(changes)
    logits = noise(len(mixed), width, seed) * float(rng.choice([0.01, 1, 4, 30]))
    logits = logits.round(decimals=int(rng.integers(0, 4)))  # many ties, or few
    assert torch.equal(kept_by_triton(logits, mixed), kept_by_torch(logits, mixed))
    check_sampling(logits, mixed)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53, 1.0])
def test_the_ends_of_the_uniform_range(uniform, monkeypatch):
    for module in (draw, triton_draw):
        monkeypatch.setattr(module, "uniforms", lambda rows: np.full(len(rows), uniform))
    mixed = sequences()
    check_sampling(KINDS["holes"](len(mixed), WIDTH), mixed)


def test_a_row_draws_the_same_token_in_any_batch():
    mixed = sequences()
    logits = KINDS["spread"](len(mixed), WIDTH)
    together = sample(logits, mixed, CUDA)
    for row in range(0, len(mixed), 9):
        alone = sample(logits[row : row + 1], mixed[row : row + 1], CUDA)
        assert alone.token_ids == together.token_ids[row]
        assert alone.logprobs == together.logprobs[row]


def test_greedy_rows_between_drawn_ones_and_changed_logits():
    mixed = sequences([{"top_p": 0.8}, {"repetition_penalty": 5.0}])
    greedy = [SamplingParams(temperature=0, logit_bias={3: 40.0}, logprobs=n) for n in (None, 2)]
    mixed[1:1] = [Sequence(90 + id, [1, 2], params) for id, params in enumerate(greedy)]
    logits = noise(len(mixed), WIDTH) * 3
    before = logits.clone()
    expected, got = (sample(logits, mixed, device) for device in (CPU, CUDA))
    assert torch.equal(got.token_ids, expected.token_ids)
    assert got.token_ids[1] == 3
    ranked = [choices.wait()[2].top_logprobs[0] for choices in (got, expected)]
    assert ranked[0].token_ids == ranked[1].token_ids
    assert torch.equal(logits, before)


@pytest.mark.matrix
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("whole_row", [True, False])
def test_rows_without_probabilities(bad, whole_row):
    mixed = sequences()
    logits = noise(len(mixed), WIDTH)
    logits[::2, slice(None) if whole_row else slice(400, 401)] = bad
    check_sampling(logits, mixed)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, best_tokens.CHUNK, best_tokens.CHUNK + 1])
def test_best_tokens(width, dtype):
    logits = torch.cat([kind(3, width) for kind in KINDS.values()]).to(dtype)
    logits = torch.cat([logits, logits, logits, logits])
    logits[0, width // 2] = NAN
    logits[1, -1] = -NAN
    logits[2, width // 3] = INF
    logits[3] = -INF
    logits[4], logits[4, 0] = 0.0, -0.0  # equal: the first wins
    apart = torch.full((len(logits), width + 16), NAN, dtype=dtype)[:, :width].copy_(logits)
    expected = torch_logits.best_tokens(logits)
    got = best_tokens.best_tokens(apart)
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], equal_nan=True)


def test_the_first_of_equal_tokens_wins_across_chunks():
    logits = torch.zeros(3, 3 * best_tokens.CHUNK)
    logits[1, best_tokens.CHUNK + 5 :] = 2.0
    logits[2, 7 :: best_tokens.CHUNK] = 2.0
    assert best_tokens.best_tokens(logits)[0].tolist() == [0, best_tokens.CHUNK + 5, 7]


@pytest.mark.parametrize(
    ("kind", "params", "max_share"),
    [
        ("peaked", {"top_k": 20}, 0.2),
        ("spread", {"top_k": 50, "top_p": 0.9}, 0.2),
        ("peaked", {"top_p": 0.9}, 0.3),
        ("spread", {}, 0.0),
        ("spread", {"min_p": 0.1}, 0.0),
    ],
)
def test_few_tokens_are_candidates(kind, params, max_share, monkeypatch):
    """The fewer candidates, the faster the kernel that finds the limits."""
    monkeypatch.setattr(candidates, "CHUNK", 4096)
    batch = sequences([params])
    logits = KINDS[kind](len(batch), 2 * 4096)
    found = candidates.collect_candidates(logits, logits.argmax(1), drawn_rows_of(batch))
    assert found.counts.max() <= max_share * logits.shape[1]
    assert max_share == 0 or found.counts.min() > 0


def test_the_lowest_token_of_top_k_is_a_candidate():
    logits = torch.full((1, CHUNK), -1.0)
    logits[0, : candidates.LANES] = torch.arange(candidates.LANES) / candidates.LANES
    kept = kept_by_triton(logits, sequences([{"top_k": candidates.LANES}]))
    assert kept[0].nonzero()[:, 0].tolist() == [*range(candidates.LANES)]


def test_no_rows():
    logits, none = torch.zeros(2, 9), drawn_rows_of([])
    token_ids = logits.argmax(1)
    limits = limits_of(logits, token_ids, none)
    draw_tokens.draw_tokens(logits, token_ids, none, limits, torch.zeros(0, dtype=torch.float64))
    assert token_ids.tolist() == [0, 0]
    assert best_tokens.best_tokens(logits[:0])[0].shape == (0,)


LOGITS, TOKENS = torch.zeros(3, 9), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("logits", "token_ids", "changes", "message"),
    [
        (LOGITS[0], TOKENS, {}, "they must be"),
        (LOGITS[:, :0], TOKENS, {}, "at least one token"),
        (LOGITS.double(), TOKENS, {}, "fp32, fp16 or bf16"),
        (torch.zeros(9, 3).T, TOKENS, {}, "must be contiguous"),
        (LOGITS, TOKENS[:2], {}, "one int64 per row"),
        (LOGITS, TOKENS.int(), {}, "one int64 per row"),
        (LOGITS, TOKENS, {"temperature": torch.ones(3).double()}, "temperature is"),
        (LOGITS, TOKENS, {"top_k": TOKENS[:2]}, "top_k is"),
        (LOGITS, TOKENS, {"top_p": torch.ones(6).double()[::2]}, "contiguous"),
    ],
)
def test_invalid_inputs(logits, token_ids, changes, message):
    drawn_rows = replace(drawn_rows_of(sequences([{}] * 3)), **changes)
    with pytest.raises(ValueError, match=message):
        candidates.collect_candidates(logits, token_ids, drawn_rows)


def test_limits_and_numbers_of_other_rows_are_refused():
    three = drawn_rows_of(sequences([{"top_k": 3}] * 3))
    none = drawn_rows_of([])
    found = candidates.collect_candidates(LOGITS, TOKENS, three)
    with pytest.raises(ValueError, match="counts is"):
        filter_limits.filter_limits(found, none)
    with pytest.raises(ValueError, match="uniforms is"):
        draw_tokens.draw_tokens(
            LOGITS, TOKENS, three, filter_limits.filter_limits(found, three), torch.zeros(3)
        )
