"""Embeddings equal those that sentence-transformers would compute, in any batch."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from core.errors import ConfigurationError, GenerationError, RequestError
from engine import LLM
from engine.tasks.performer import Answer, Job
from tests.engine.tasks.conftest import engine_of, perform
from tests.engine.tasks.embedding.vectors import TEXTS, embed, hidden, unit, vectors
from tests.engine.tasks.words import MAX_LENGTH, tokenizer
from tests.escaping import ESCAPING

LONG = " ".join(["cat"] * 50)


def watch_forwards(engine, watch):
    """Call `watch` before each forward pass with the lengths of its texts, in tokens."""

    def before(model, args, inputs):
        watch(inputs["attention_mask"].sum(1).tolist())

    engine.performer.model.register_forward_pre_hook(before, with_kwargs=True)


def test_the_default_is_a_normalized_mean(task_model):
    """The model has no settings of sentence-transformers.

    All texts come in one request first, and then each in a request of its own.
    """
    path = task_model("encoder")
    engine = engine_of(path)
    assert engine.facts.task == "text-embedding"
    expected = np.stack([unit(hidden(path, text).mean(0)) for text in TEXTS])
    together, num_tokens = vectors(perform(engine, embed(*TEXTS))[0])
    np.testing.assert_allclose(together, expected, atol=1e-5)
    assert num_tokens == [len(text.split()) + 2 for text in TEXTS]
    mixed = perform(engine, *map(embed, TEXTS))
    np.testing.assert_allclose(
        np.vstack([vectors(outcome)[0] for outcome in mixed]), expected, atol=1e-5
    )


POOLED = {
    "cls": lambda rows: rows[0],
    "max": lambda rows: rows.max(0),
    "mean": lambda rows: rows.mean(0),
    "mean_sqrt_len_tokens": lambda rows: rows.sum(0) / len(rows) ** 0.5,
    "weightedmean": lambda rows: np.average(rows, axis=0, weights=range(1, len(rows) + 1)),
    "lasttoken": lambda rows: rows[-1],
}


@pytest.mark.parametrize("kind", POOLED)
@pytest.mark.parametrize("place", ["old form", "new form", "option"])
def test_pooling_methods(described, kind, place):
    flag = kind if kind in ("lasttoken", "mean_sqrt_len_tokens") else f"{kind}_tokens"
    flag = "cls_token" if kind == "cls" else flag
    settings = {
        "old form": {f"pooling_mode_{flag}": True, "word_embedding_dimension": 16},
        "new form": {"pooling_mode": kind},
        "option": {"pooling_mode": "something else"},
    }[place]
    path = described(pooling=settings, normalize=False)
    engine = engine_of(path, pooling=kind if place == "option" else None)
    got, _ = vectors(perform(engine, embed(*TEXTS))[0])
    expected = [POOLED[kind](hidden(path, text)) for text in TEXTS]
    np.testing.assert_allclose(got, np.stack(expected), atol=1e-5)


def test_several_poolings_are_concatenated(described):
    """The poolings keep the order of the settings, but the old format has a fixed order."""
    for settings, order in (
        ({"pooling_mode": ["mean", "cls"]}, ("mean", "cls")),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
    ):
        path = described(pooling=settings)
        got, _ = vectors(perform(engine_of(path), embed("the cat"))[0])
        rows = hidden(path, "the cat")
        expected = unit(np.concatenate([POOLED[kind](rows) for kind in order]))
        np.testing.assert_allclose(got[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("says", "option", "is_unit"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_normalization_follows_the_model_or_the_option(described, says, option, is_unit):
    engine = engine_of(described(normalize=says), normalize=option)
    got, _ = vectors(perform(engine, embed("the cat"))[0])
    assert (np.linalg.norm(got) == pytest.approx(1)) == is_unit
    assert "modules.json" in engine.facts.notes[0]
    assert ("are normalized" in engine.facts.notes[0]) == is_unit


def test_the_models_prompt_and_lower_casing_are_applied(described):
    path = described(
        sentence_bert_config={"max_seq_length": 6, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"q": "the "}, "default_prompt_name": "q"},
    )
    engine = engine_of(path)
    assert engine.facts.max_model_len == 6
    got, num_tokens = vectors(perform(engine, embed("CAT"))[0])
    np.testing.assert_allclose(got[0], unit(hidden(path, "the cat").mean(0)), atol=1e-5)
    assert num_tokens == [4]


def test_a_request_may_name_a_prompt_and_leave_vectors_as_long_as_they_are(described):
    path = described(
        config_sentence_transformers={"prompts": {"q": "the ", "d": ""}, "default_prompt_name": "q"}
    )
    given = embed("the cat", prompt_name="d"), embed("cat", normalize=False), embed("cat")
    *got, wrong = perform(engine_of(path), *given, embed("a", prompt_name="x"))
    document, raw, usual = (vectors(outcome)[0][0] for outcome in got)
    mean = hidden(path, "the cat").mean(0)
    np.testing.assert_allclose(raw, mean, atol=1e-5)
    np.testing.assert_allclose(document, unit(mean), atol=1e-5)
    np.testing.assert_allclose(usual, unit(mean), atol=1e-5)
    assert (wrong.field, "prompts are q, d" in str(wrong)) == ("prompt_name", True)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"types": ["Transformer", "Pooling", "LSTM"]}, "names LSTM, which"),
        ({"pooling": {"pooling_mode": "attention"}}, "pooling is attention"),
        ({"pooling": {"word_embedding_dimension": 16}}, "pooling is not set"),
        (
            {
                "pooling": {"pooling_mode": "mean", "include_prompt": False},
                "config_sentence_transformers": {
                    "prompts": {"q": "a "},
                    "default_prompt_name": "q",
                },
            },
            "include_prompt",
        ),
    ],
)
def test_unsupported_settings_are_rejected(described, files, message):
    with pytest.raises(ConfigurationError, match=message):
        engine_of(described(**files))


def test_token_ids(task_model):
    engine = engine_of(task_model("encoder"))
    ids = tokenizer()("the cat")["input_ids"]
    text, tokens, wrong, negative = perform(
        engine, embed("the cat"), embed(ids), embed([99]), embed("a", [-1])
    )
    np.testing.assert_allclose(vectors(tokens)[0], vectors(text)[0], atol=1e-6)
    assert [outcome.field for outcome in (wrong, negative)] == ["input", "input[1]"]


def test_a_text_that_is_too_long_is_rejected_or_truncated(task_model):
    path = task_model("encoder")
    engine = engine_of(path)
    refused, beside, cut, less, tokens = perform(
        engine,
        embed("the cat", LONG),
        embed("the cat"),
        embed(LONG, max_tokens=10**9),
        embed(LONG, max_tokens=5),
        embed([6] * 50, max_tokens=5),
    )
    assert isinstance(refused, RequestError)
    assert refused.field == "input[1]"
    assert "truncate_prompt_tokens=-1" in str(refused)
    assert vectors(beside)[1] == [4]
    assert [vectors(outcome)[1] for outcome in (cut, less, tokens)] == [[MAX_LENGTH], [5], [5]]
    expected = unit(hidden(path, "cat cat cat").mean(0))
    np.testing.assert_allclose(vectors(less)[0][0], expected, atol=1e-5)


def test_truncation_that_leaves_no_token_of_a_text_is_rejected(task_model):
    """The model adds two special tokens to a text, and none to token ids."""
    engine = engine_of(task_model("encoder"))
    for number in (1, 2):
        outcome = perform(engine, embed("the cat", max_tokens=number))[0]
        assert (outcome.field, "at least 3" in str(outcome)) == ("truncate_prompt_tokens", True)
    for request in (embed("the cat", max_tokens=3), embed([5, 6], max_tokens=1)):
        assert isinstance(perform(engine, request)[0], Answer)


def test_max_model_len_can_be_lowered_but_not_raised(task_model):
    path = task_model("encoder")
    assert engine_of(path, max_model_len=9).facts.max_model_len == 9
    with pytest.raises(ConfigurationError, match="the model takes 32 tokens"):
        engine_of(path, max_model_len=33)


def test_dimensions_need_a_matryoshka_model(task_model, tmp_path):
    plain = engine_of(task_model("encoder"))
    whole, refused = perform(plain, embed("the cat"), embed("the cat", dimensions=4))
    assert refused.field == "dimensions"
    width = len(vectors(whole)[0][0])
    (same,) = perform(plain, embed("the cat", dimensions=width))
    np.testing.assert_allclose(vectors(same)[0], vectors(whole)[0], atol=1e-6)
    shutil.copytree(task_model("encoder"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [4, 8]}))
    engine = engine_of(tmp_path)
    whole, cut, wrong = perform(
        engine, embed("the cat"), embed("the cat", dimensions=4), embed("a", dimensions=5)
    )
    np.testing.assert_allclose(vectors(cut)[0][0], unit(vectors(whole)[0][0][:4]), atol=1e-5)
    assert wrong.field == "dimensions"


@pytest.mark.parametrize("name", ["roberta", "t5", "llama"])
def test_other_architectures(task_model, name):
    """roberta has offset positions, t5 is an encoder-decoder, and llama is a decoder."""
    path = task_model(name)
    engine = engine_of(path, task="embed")
    get = (lambda model: model.get_encoder()) if name == "t5" else (lambda model: model)
    assert engine.facts.max_model_len == (19 if name == "roberta" else MAX_LENGTH)
    encoder = "transformers' code (t5): model type t5 is not in the family table"
    assert engine.facts.encoder == (encoder if name == "t5" else f"own ({name})")
    text = " ".join(["dog"] * (engine.facts.max_model_len - 2))
    expected = np.stack([unit(hidden(path, sample, get).mean(0)) for sample in (text, "the cat")])
    got, _ = vectors(perform(engine, embed(text, "the cat"))[0])
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_forward_pass_stays_within_the_token_budget(task_model):
    engine = engine_of(task_model("encoder"), max_rolling_batch_prefill_tokens=12)
    sizes = []
    watch_forwards(engine, lambda lengths: sizes.append(sorted(lengths)))
    alone = [vectors(outcome)[0] for outcome in perform(engine, *map(embed, TEXTS))]
    assert sorted(chain(*sizes)) == sorted(len(text.split()) + 2 for text in TEXTS)
    assert all(sum(size) <= 12 or len(size) == 1 for size in sizes)
    assert max(map(len, sizes)) > 1
    np.testing.assert_allclose(
        vectors(perform(engine, embed(*TEXTS))[0])[0], np.vstack(alone), atol=1e-5
    )


def start(engine, *texts):
    return engine.add(Job(msgspec.msgpack.encode(embed(*texts))), 0.0)


def test_a_single_text_waits_one_step_for_a_request_of_many(task_model):
    """With `dynamic`, its batch begins when the one that runs has ended."""
    texts = ["the cat"] * 20
    for batching, is_first in (("continuous", True), ("dynamic", False), ("none", False)):
        engine = engine_of(
            task_model("encoder"), batching=batching, max_rolling_batch_prefill_tokens=16
        )
        many = start(engine, *texts)
        assert engine.advance(1.0) == []
        single = start(engine, "who")
        ended = [output for _ in range(8) for output in engine.advance(1.0)]
        order = [single, many] if is_first else [many, single]
        assert [output.request_id for output in ended] == order
        assert not engine.has_work()
        (got,) = (output.outcome for output in ended if output.request_id == many)
        np.testing.assert_allclose(
            vectors(got)[0], np.tile(vectors(perform(engine, embed("the cat"))[0])[0], (20, 1)),
            atol=1e-6,
        )  # fmt: skip


def test_an_aborted_request_is_not_embedded_further(task_model):
    engine = engine_of(task_model("encoder"), max_rolling_batch_prefill_tokens=16)
    assert engine.facts.batching == "continuous"
    many = start(engine, *["the cat"] * 20)
    engine.advance(0.0)
    assert len(engine.performer._running) == 1
    engine.abort(many)
    assert not engine.has_work()
    assert not engine.performer._running


def test_a_failing_text_fails_only_its_request(task_model):
    engine = engine_of(task_model("encoder"))

    def fail(lengths):
        if 3 in lengths:
            raise RuntimeError("three")

    watch_forwards(engine, fail)
    outcomes = perform(engine, embed("the cat"), embed("a dog ran", "who"), embed("it ran"))
    assert [isinstance(outcome, RuntimeError) for outcome in outcomes] == [False, True, False]


@pytest.mark.parametrize("kind", [*ESCAPING, TypeError])
@pytest.mark.parametrize("part", ["_tokenizer", "model"])
def test_a_panic_of_a_library_fails_only_its_request(task_model, monkeypatch, part, kind):
    engine = engine_of(task_model("encoder"))
    usual = getattr(engine.performer, part)

    class Panics:
        def __getattr__(self, name):
            return getattr(usual, name)

        def __call__(self, *arguments, **keywords):
            if ["who"] in arguments or 3 in keywords.get("attention_mask", torch.zeros(1, 1)).sum(
                1
            ):
                raise kind("why")
            return usual(*arguments, **keywords)

    monkeypatch.setattr(engine.performer, part, Panics())
    good, bad = perform(engine, embed("the cat"), embed("who"))
    assert isinstance(good, Answer)
    assert "why" in str(bad)


def test_offline_embeddings(task_model):
    path = task_model("encoder")
    llm: Any = LLM(path, dtype="fp32", device="cpu", max_batch_delay=1, batch_size=2)
    outputs = llm.embed(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        assert output.prompt == text
        np.testing.assert_allclose(
            output.outputs.embedding, unit(hidden(path, text).mean(0)), atol=1e-5
        )
    (alone,) = llm.embed("the cat", use_tqdm=False)
    assert alone.outputs.embedding == pytest.approx(outputs[0].outputs.embedding, abs=1e-5)
    (cut,) = llm.embed(LONG, truncate_prompt_tokens=-1, use_tqdm=False)
    assert cut.num_prompt_tokens == MAX_LENGTH
    with pytest.raises(RequestError, match="has 52 tokens"):
        llm.embed(["the cat", LONG], use_tqdm=False)
    with pytest.raises(RequestError, match="call embed"):
        llm.generate("the cat", use_tqdm=False)
    assert not llm.embedding_engine.has_work(), "rejected requests leave nothing behind"


def test_offline_calls_must_match_the_task(task_model, tiny_model):
    with pytest.raises(ConfigurationError, match="text-classification"):
        LLM(task_model("classifier"))
    with pytest.raises(RequestError, match="text-embedding"):
        LLM(tiny_model("llama"), dtype="fp32", device="cpu").embed("x")


def test_a_failure_is_raised_offline(task_model):
    llm = LLM(task_model("encoder"), dtype="fp32", device="cpu", batching="none")

    def fail(lengths):
        raise RuntimeError("broken")

    watch_forwards(llm.embedding_engine, fail)
    with pytest.raises(GenerationError, match="broken"):
        llm.embed("the cat", use_tqdm=False)
