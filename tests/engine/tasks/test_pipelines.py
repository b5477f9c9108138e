"""Tasks of transformers' pipelines: answers equal transformers' own, in any batch."""

from __future__ import annotations

import json
import math
import shutil
from typing import Any

import pytest
import torch
import transformers
from transformers import pipeline

from core.errors import ConfigurationError, RequestError
from engine.tasks.performer import Answer
from tests.engine.tasks.bodies import as_transformers_wants_it, body, close, image, wav
from tests.engine.tasks.conftest import decoded, engine_of, perform
from tests.engine.tasks.words import WORDS
from tests.escaping import ESCAPING

LONG = " ".join(["cat"] * 50)


REQUESTS = [
    ("classifier", "text-classification", [
        body("the cat sat"), body("a dog"), body(["the mat", "it ran"]), body("on a mat", top_k=2),
        body(["dog", "cat ran", "it"], top_k=None), body(["who is it"]),
        body({"text": "the cat", "text_pair": "a dog"}), body([{"text": "the cat"}, "a dog"]),
        body("dog", function_to_apply="none"), body(LONG, truncation=True),
    ]),
    ("reranker", "text-classification", [
        body([{"text": "the cat", "text_pair": text} for text in ("a dog", "it ran")], top_k=2,
             function_to_apply="sigmoid"),
        body([{"text": "the cat", "text_pair": LONG}], top_k=2, function_to_apply="none",
             truncation=True),
    ]),
    ("tagger", "token-classification", [
        body("the cat sat"), body(["a dog ran on it", "the mat"]),
        body("the cat sat on a mat", aggregation_strategy="simple"), body(["who"]),
    ]),
    ("filler", "fill-mask", [
        body("the [MASK] sat", top_k=2), body("a [MASK]"), body(["[MASK] ran", "it is [MASK]"]),
        body(["the [MASK]"], top_k=1),
    ]),
    ("entailer", "zero-shot-classification", [
        # The default template appends a full stop to the label, which gives an unknown word.
        body("the cat sat", candidate_labels=["cat", "dog"], hypothesis_template="it is {}"),
        body(["a dog", "the mat"], candidate_labels=["cat", "dog"], hypothesis_template="a {}"),
        body("it ran", candidate_labels=["mat"], multi_label=True),
    ]),
    ("encoder", "feature-extraction", [body("the cat"), body(["a dog ran", "it"])]),
    ("viewer", "image-classification", [
        body(image("red")), body([image("blue"), image("green", (30, 9))], top_k=1),
    ]),
    ("hearer", "audio-classification", [
        body(wav(1)), body([wav(2), wav(3, 900)], top_k=1), body([wav(4)]),
    ]),
    ("listener", "automatic-speech-recognition", [
        body(wav(1)), body([wav(2), wav(3, 900)]), body(wav(1), return_timestamps="char"),
    ]),
    ("whisper", "automatic-speech-recognition", [
        body(wav(1, 12_000, 16_000)), body([wav(2, 3000, 16_000), wav(3, 9000, 16_000)]),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "task", "requests"), REQUESTS)
def test_batched_answers_equal_those_of_transformers(task_model, name, task, requests):
    path = task_model(name)
    engine = engine_of(path, task=task)
    reference: Any = pipeline(task, model=str(path), dtype=torch.float32, device="cpu")

    def expected(request):
        read = list(map(as_transformers_wants_it, request.inputs))
        if len(read) == 1 and request.is_batch:  # some pipelines unpack a list of one
            (alone,) = reference([read[0], read[0]], **request.parameters)[:1]
            return [alone]
        return reference(read if request.is_batch else read[0], **request.parameters)

    for request, outcome in zip(requests, perform(engine, *requests), strict=True):
        plain = json.loads(json.dumps(expected(request), default=lambda array: array.tolist()))
        assert close(decoded(outcome), plain)


def test_a_cross_encoder_gives_a_list_of_one_label_for_each_pair(task_model):
    """The front end reads scores in this form (container/apis/tasks/rerank.py)."""
    engine = engine_of(task_model("reranker"))
    pairs = [{"text": "the cat", "text_pair": second} for second in ("a dog", "it ran")]
    asked = [body(pairs, top_k=2, function_to_apply=name) for name in ("sigmoid", "none")]
    probabilities, logits = map(decoded, perform(engine, *asked))
    for [probability], [logit] in zip(probabilities, logits, strict=True):
        assert probability["score"] == pytest.approx(1 / (1 + math.exp(-logit["score"])), abs=1e-5)


def test_the_task_follows_from_the_model(task_model):
    facts = engine_of(task_model("classifier")).facts
    assert (facts.task, facts.executor, facts.batching) == (
        "text-classification",
        "task",
        "continuous",
    )
    assert facts.architecture == "BertForSequenceClassification"
    assert facts.weights_bytes > 0


def test_an_invalid_request_fails_alone(task_model):
    engine = engine_of(task_model("classifier"))
    alone = decoded(perform(engine, body("the cat"))[0])
    outcomes = perform(
        engine,
        body("the cat"),
        body(LONG),
        body("the cat", function_to_apply="nonsense"),
        body({"texts": "the cat"}),
        body(["the cat", LONG]),
        body([LONG, LONG]),
        body("the cat"),
    )
    for at in (0, 6):
        assert close(decoded(outcomes[at]), alone)
    for at, reason in (
        (1, "52 tokens; the model takes 32"),
        (2, "parameters: not"),
        (3, "text_pair"),
    ):
        assert isinstance(outcomes[at], RequestError)
        assert reason in str(outcomes[at])
    good, bad = decoded(outcomes[4])
    assert close([good], alone)
    assert (bad["code"], bad["field"]) == (400, "inputs")
    assert isinstance(outcomes[5], RequestError), "no input has a result"


@pytest.mark.parametrize(
    ("model", "parameters", "is_truncated"),
    [
        ("classifier", {}, False),
        ("classifier", {"truncation": False}, False),
        ("classifier", {"truncation": "do_not_truncate"}, False),
        ("classifier", {"max_length": 9}, False),
        ("classifier", {"truncation": True}, True),
        ("classifier", {"truncation": True, "max_length": 100_000}, True),
        ("classifier", {"truncation": "longest_first", "max_length": 9}, True),
        ("filler", {"tokenizer_kwargs": {}}, False),
        ("filler", {"tokenizer_kwargs": {"truncation": False}}, False),
        ("filler", {"tokenizer_kwargs": {"truncation": True, "max_length": 100_000}}, True),
        ("encoder", {"tokenize_kwargs": {"max_length": 100_000}}, False),
        ("encoder", {"tokenize_kwargs": {"truncation": True, "max_length": 100_000}}, True),
        ("encoder", {"truncation": True}, True),
    ],
)
def test_only_a_text_that_is_truncated_may_be_too_long(task_model, model, parameters, is_truncated):
    options = {"task": "feature-extraction"} if model == "encoder" else {}
    engine = engine_of(task_model(model), **options)
    text = f"[MASK] {LONG}" if model == "filler" else LONG
    (outcome,) = perform(engine, body(text, **parameters))
    assert isinstance(outcome, Answer) == is_truncated
    if not is_truncated:
        assert (outcome.field, "the model takes 32" in str(outcome)) == ("inputs", True)
        where = "parameters.tokenizer_kwargs" if model == "filler" else "parameters"
        assert f"set {where}.truncation=true" in str(outcome), "the cure is one that works"


@pytest.mark.parametrize(
    ("name", "options", "parameters"),
    [
        ("classifier", {}, {"truncation": True}),
        ("tagger", {}, {}),
        ("entailer", {"task": "zero-shot-classification"}, {"candidate_labels": ["cat"]}),
    ],
)
def test_texts_are_cut_to_the_models_limit_if_the_tokenizer_has_none(
    task_model, tmp_path, name, options, parameters
):
    shutil.copytree(task_model(name), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"model_max_length": 10**30}
    path.write_text(json.dumps(settings))
    (outcome,) = perform(engine_of(tmp_path, **options), body(LONG, **parameters))
    assert isinstance(outcome, Answer)


@pytest.mark.parametrize(
    ("name", "text", "nested"),
    [
        ("classifier", "the cat", False),
        ("classifier", {"text": "the cat", "text_pair": "a dog"}, False),
        ("filler", "[MASK] cat", True),
    ],
)
def test_truncation_that_leaves_no_token_is_rejected(task_model, name, text, nested):
    """transformers would then not truncate at all. The pair has one special token more."""
    engine = engine_of(task_model(name))
    lowest = 4 if isinstance(text, dict) else 3
    for length in range(1, 5):
        arguments = {"truncation": True, "max_length": length}
        parameters = {"tokenizer_kwargs": arguments} if nested else arguments
        (outcome,) = perform(engine, body(text, **parameters))
        assert isinstance(outcome, Answer) == (length >= lowest)
        field = "parameters.tokenizer_kwargs.max_length" if nested else "parameters.max_length"
        assert length >= lowest or outcome.field == field


def test_a_text_without_a_mask_and_more_words_than_the_vocabulary_has(task_model):
    engine = engine_of(task_model("filler"))
    without, many = perform(engine, body("the cat"), body("the [MASK]", top_k=1000))
    assert (type(without), without.field) == (RequestError, "inputs")
    assert len(decoded(many)) == engine.performer.model.model.config.vocab_size


def test_a_label_that_leaves_no_room_for_the_text_is_rejected(task_model):
    """transformers would then not truncate the text at all."""
    engine = engine_of(task_model("entailer"), task="zero-shot-classification")
    for words, fits in ((28, True), (29, False)):
        parameters = {"candidate_labels": ["cat", "dog " * words], "hypothesis_template": "{}"}
        (outcome,) = perform(engine, body(LONG, **parameters))
        assert isinstance(outcome, Answer) == fits
        assert fits or outcome.field == "parameters.candidate_labels"


def test_windows_of_a_long_text_overlap_by_at_most_half(task_model):
    """The windows have 30 tokens without the special ones. With 30, tokenizers would panic."""
    engine = engine_of(task_model("tagger"))
    for stride, is_accepted in ((0, True), (15, True), (16, False), (30, False), (31, False)):
        request = body(LONG, stride=stride, aggregation_strategy="simple")
        (outcome,) = perform(engine, request)
        assert isinstance(outcome, Answer) == is_accepted
        assert is_accepted or outcome.field == "parameters.stride"


def test_the_inputs_of_a_request_run_in_parts(task_model):
    engine = engine_of(task_model("tagger"))
    model = engine.performer.model = Failing(engine.performer.model)
    (outcome,) = perform(engine, body(["cat"] * 70))
    assert len(decoded(outcome)) == 70
    assert model.sizes == [32, 32, 6]


def test_zero_shot_tasks_need_candidate_labels(task_model):
    engine = engine_of(task_model("entailer"), task="zero-shot-classification")
    (outcome,) = perform(engine, body("the cat"))
    assert outcome.field == "parameters.candidate_labels"


def has_word(word, inputs):
    """Return whether a word is one of the texts, as they are or as tokens."""
    tokens = {"input_ids": [2, WORDS.index(word), 3]}
    return any(
        (given == word) if isinstance(given, str) else tokens.items() <= given.encoded.items()
        for given in inputs
    )


class Failing:
    """A model that fails if an input equals `bad`, or if it gets more than `fits` inputs."""

    def __init__(self, model, bad="", fits=99):
        self.model, self.bad, self.fits, self.sizes = model, bad, fits, []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def run(self, inputs, parameters, between_runs):
        self.sizes.append(len(inputs))
        if len(inputs) > self.fits:
            raise torch.OutOfMemoryError("too many")
        if self.bad and has_word(self.bad, inputs):
            raise RuntimeError("bad input")
        return self.model.run(inputs, parameters, between_runs)


@pytest.fixture
def failing(task_model):
    """Return an engine and its model."""
    engine = engine_of(task_model("classifier"))
    performer = engine.performer
    performer.model = Failing(performer.model)
    return engine, performer.model


def test_a_failing_input_fails_only_its_request(failing):
    engine, model = failing
    model.bad = "who"
    outcomes = perform(engine, *map(body, ("a", "the cat", "who", "it", ["dog", "who"])))
    assert isinstance(outcomes[2], RuntimeError)
    for at in (0, 1, 3):
        assert decoded(outcomes[at])[0]["label"]
    good, bad = decoded(outcomes[4])
    assert good["label"]
    assert bad == {"error": "RuntimeError: bad input", "code": 424}


@pytest.mark.parametrize("kind", ESCAPING)
@pytest.mark.parametrize(
    ("name", "method"),
    [("tagger", "prepare"), ("tagger", "run"), ("classifier", "sized"), ("classifier", "run")],
)
def test_a_panic_of_a_library_fails_only_its_request(task_model, monkeypatch, name, method, kind):
    engine = engine_of(task_model(name))
    usual = getattr(engine.performer.model, method)

    def fail(first, *others):
        if first == "who" or (isinstance(first, list) and has_word("who", first)):
            raise kind("why")
        return usual(first, *others)

    monkeypatch.setattr(engine.performer.model, method, fail)
    outcomes = perform(engine, *map(body, ("a", "who", "it")))
    assert [decoded(outcomes[at]) for at in (0, 2)]
    assert str(outcomes[1]) == f"{kind.__name__}: why"


@pytest.mark.parametrize("kind", [*ESCAPING, OSError])
def test_an_answer_that_cannot_be_encoded_fails_only_its_request(failing, monkeypatch, kind):
    engine, _ = failing

    def encode(results):
        if len(results) > 1:
            raise kind("why")
        return b"[]"

    monkeypatch.setattr("engine.tasks.pipelines.pipelines.encode_json", encode)
    good, bad = perform(engine, body("a"), body(["a", "b"]))
    assert decoded(good) == []
    assert "why" in str(bad)


def test_a_batch_too_large_for_memory_runs_in_parts(failing):
    engine, model = failing
    model.fits = 2
    outcomes = perform(engine, *map(body, ("a", "the cat", "who", "it", "dog")))
    assert [decoded(outcome)[0]["label"] for outcome in outcomes]
    assert model.sizes == [5, 2, 3, 1, 2]


def test_a_lost_device_ends_the_engine(failing):
    engine, model = failing
    model.run = lambda *_: (_ for _ in ()).throw(torch.AcceleratorError("gone"))
    with pytest.raises(torch.AcceleratorError):
        perform(engine, body("a"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("classifier", {"task": "text-clasification"}, "did you mean 'text-classification'"),
        ("classifier", {"task": "summarization"}, "no such pipeline"),
        ("classifier", {"task": "decision"}, "model.py|no such pipeline"),
        ("classifier", {"task": "automatic-speech-recognition"}, "cannot load bert"),
        ("hearer", {"task": "automatic-speech-recognition"}, "was not trained for"),
        ("encoder", {"task": "text-classification"}, "was not trained for text-classification"),
        ("encoder", {"task": "question-answering"}, "was not trained for question-answering"),
        ("viewer", {"task": "text-classification"}, "cannot load vit"),
        ("classifier", {"batching": "paged"}, "option.batching=none or dynamic or continuous"),
        ("classifier", {"rolling_batch": "auto"}, "option.rolling_batch=auto chooses paged"),
        ("classifier", {"executor": "packed"}, "option.executor=packed"),
    ],
)
def test_unsupported_models_and_tasks_are_rejected(task_model, name, options, message):
    with pytest.raises(ConfigurationError, match=message):
        engine_of(task_model(name), **options)


@pytest.mark.parametrize("kind", ESCAPING)
@pytest.mark.parametrize("part", ["AutoTokenizer", "AutoModelForSequenceClassification"])
def test_a_library_cannot_end_the_start_without_a_reason(task_model, monkeypatch, part, kind):
    def fail(*arguments, **keywords):
        raise kind("why")

    monkeypatch.setattr(getattr(transformers, part), "from_pretrained", fail)
    with pytest.raises(ConfigurationError, match=f"cannot load bert .*: {kind.__name__}: why"):
        engine_of(task_model("classifier"))


def test_random_weights_need_no_weight_file(task_model, tmp_path):
    for path in task_model("classifier").iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (outcome,) = perform(engine_of(tmp_path, load_format="dummy"), body("the cat"))
    assert decoded(outcome)[0]["label"]


def test_invalid_images_are_rejected(task_model):
    engine = engine_of(task_model("viewer"))
    whole = image("red", (64, 64))
    outcomes = perform(engine, body(b"GIF"), body(whole[: len(whole) // 2]), body(whole))
    assert [getattr(outcome, "field", "") for outcome in outcomes] == ["inputs", "inputs", ""]


def test_speech_recognition(task_model, tmp_path, caplog):
    engine = engine_of(task_model("listener"))
    assert engine.facts.task == "automatic-speech-recognition"
    text, wrong = perform(engine, body(wav(1)), body(b"OggS"))
    assert decoded(text)["text"], "any text will do"
    assert wrong.field == "inputs"
    for file in task_model("listener").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "preprocessor_config.json"
    settings = json.loads(path.read_text()) | {"processor_class": "Wav2Vec2ProcessorWithLM"}
    path.write_text(json.dumps(settings))
    assert "language model" not in caplog.text
    assert perform(engine_of(tmp_path), body(wav(1))) == [text]
    assert "has a language model for decoding, which is not used" in caplog.text
