"""Answers have the same bits in any schedule as alone (tests/engine/same_bits.py)."""

from __future__ import annotations

from collections import Counter

import pytest

from engine import LLM
from kernels.cpu.shared_library import unavailable_reason
from tests.engine.same_bits import DTYPES, MODELS, Subject, make_subjects, run
from tests.engine.tiny_models import OWN

if unavailable_reason() is not None:
    pytest.skip("torch's products depend on the batch", allow_module_level=True)

OWN_SEEDS = {architecture: seed for seed, architecture in enumerate(OWN)}
NOTE = "the last bits of an answer may depend on its batch: "


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_random_schedules(model, dtype, tmp_path):
    seed = 10 * [*MODELS].index(model) + [*DTYPES].index(dtype)
    counts = Counter()
    for subject in make_subjects(tmp_path, lambda *names: names == (model, dtype)):
        run(subject, seed, counts)
    assert counts["answers"] > 0


PAGED = {"batching": "paged", "num_kv_blocks": 29, "block_size": 4, "swap_space_gib": 0.1,
         "enable_prefix_caching": False}  # fmt: skip


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_answers(mode, tmp_path):
    [subject, *_] = make_subjects(tmp_path, lambda *names: names == ("llama", "fp32"))
    subject.lengths = (30, 60, 100)
    counts = Counter()
    for seed in (0, 5):
        run(subject, seed, counts, {**PAGED, "preemption_mode": mode})
    assert counts["preemptions"] > 0


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("architecture", OWN)
def test_every_family(tiny_model, architecture):
    path = tiny_model(architecture, is_wide=True)
    # transformers clamps the time steps of these in prompts only.
    clamps = architecture in ("falcon_h1", "nemotron_h")
    subject = Subject(path, {"dtype": "fp32"}, lengths=(1, 17, 96), scores_like_answers=not clamps)
    run(subject, OWN_SEEDS[architecture], Counter())


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("llama", "torch computes the attention"),  # heads of 8
        ("biogpt", "transformers' code computes this model"),
        ("bloom", "transformers' code computes this model"),
    ],
)
def test_exceptions_are_noted_at_the_start(tiny_model, architecture, reason):
    assert NOTE + reason in LLM(tiny_model(architecture), dtype="fp32").facts.notes


def test_fp8_caches_are_noted_at_the_start(tiny_model):
    llm = LLM(tiny_model("llama", is_wide=True), dtype="fp32", kv_cache_dtype="fp8")
    assert NOTE + "torch computes the attention" in llm.facts.notes


def test_the_promise_has_no_note(tiny_model):
    notes = LLM(tiny_model("llama", is_wide=True), dtype="fp32").facts.notes
    assert not [note for note in notes if note.startswith(NOTE)]
