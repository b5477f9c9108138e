"""Random requests to pipelines, with parameters at and beyond their bounds.

Each request goes through the front end's checks to a real, tiny model.
"""

from __future__ import annotations

import base64
import random

import msgspec
import pytest

from container.apis.tasks.pipeline import read_pipeline_request
from container.apis.tasks.pipeline_parameters import NESTED, PARAMETERS
from core.configuration.pipeline_tasks import PIPELINE_TASKS
from core.errors import RequestError
from engine.tasks.performer import Answer
from tests.engine.tasks.bodies import image, wav
from tests.engine.tasks.conftest import decoded, engine_of, perform

REQUESTS = 80
MODELS = {
    "text-classification": "classifier",
    "token-classification": "tagger",
    "fill-mask": "filler",
    "feature-extraction": "encoder",
    "zero-shot-classification": "entailer",
    "question-answering": "reader",
    "document-question-answering": "page_reader",
    "table-question-answering": "table_reader",
    "image-classification": "viewer",
    "automatic-speech-recognition": "listener",
    "image-text-to-text": "chatter",
}
WORDS = ["the", "cat", "[MASK]", "on", "é", "\U0001f600", "x" * 40, "\n", "[CLS]", "<image>"]
HOSTILE = [None, True, 0, -1, 1, 10**30, 1e300, 2**63, "", "x", [], {}, [1], {"a": 1}]


class Requests:
    """Makes random requests to a task."""

    def __init__(self, task):
        self.task = task
        self.random = random.Random(task)

    def body(self):
        names = PIPELINE_TASKS[self.task].parameters
        chosen = self.random.sample(names, min(len(names), self.random.randint(0, 3)))
        parameters = {"candidate_labels": "cat,dog"} if self.task.startswith("zero-shot") else {}
        parameters |= {name: self._parameter(name) for name in chosen}
        if self.task == "image-text-to-text":
            parameters |= {"max_new_tokens": 2, "generate_kwargs": {}}  # for speed
        one = self.random.random() < 0.7
        return {"inputs": self._input() if one else [self._input(), self._input()],
                "parameters": parameters}  # fmt: skip

    def _parameter(self, name):
        if name in NESTED and self.random.random() < 0.9:
            return {key: self._value(kind) for key, kind in NESTED[name].items()}
        return self._value(PARAMETERS[name])

    def _value(self, kind):
        schema, choose = kind.schema, self.random.choice
        if self.random.random() < 0.1:
            return choose(HOSTILE)
        if "minimum" in schema:
            lowest, highest = schema["minimum"], schema["maximum"]
            small = min(highest, max(lowest, choose([1, 2, 3, 5, 9, 16, 30, 31, 32])))
            return choose([lowest, highest, small])
        return choose(schema.get("enum") or [True, "cat", ["cat", "dog"], "a,b", "it is {}", "{}"])

    def _text(self):
        return " ".join(self.random.choices(WORDS, k=self.random.choice([1, 3, 10, 40, 200])))

    def _input(self):
        match self.task:
            case "question-answering":
                return {"question": self._text(), "context": self._text()}
            case "document-question-answering":
                words = [[word, self._box()] for word in self._text().split()]
                return {"image": encoded(image("red")), "question": self._text(),
                        "word_boxes": words or [["a", [0, 0, 1, 1]]]}  # fmt: skip
            case "table-question-answering":
                return {"table": {"a": [self._text(), "1"]}, "query": self._text()}
            case "image-text-to-text":
                return {"text": self._text(), "image": encoded(image("red"))}
            case "image-classification":
                return encoded(image("red"))
            case "automatic-speech-recognition":
                return encoded(wav(1, self.random.choice([900, 4000])))
            case _:
                pair = {"text": self._text(), "text_pair": self._text()}
                return self.random.choice([self._text(), pair])

    def _box(self):
        left, right = sorted(self.random.choices(range(1001), k=2))
        top, bottom = sorted(self.random.choices(range(1001), k=2))
        return [left, top, right, bottom]


def encoded(data):
    return base64.b64encode(data).decode()


@pytest.mark.filterwarnings("ignore::UserWarning")  # transformers' own
@pytest.mark.parametrize("task", MODELS)
def test_every_request_is_answered_or_refused_by_name(task_model, task):
    engine = engine_of(task_model(MODELS[task]), task=task)
    requests, num_answers = Requests(task), 0
    for _ in range(REQUESTS):
        body = requests.body()
        try:
            request, *_ = read_pipeline_request(body, task)
        except RequestError:
            continue
        wired = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request))
        (outcome,) = perform(engine, wired)
        assert isinstance(outcome, Answer | RequestError), body
        if isinstance(outcome, Answer):
            num_answers += 1
            results = decoded(outcome) if request.is_batch else []
            assert all(not isinstance(item, dict) or item.get("code") != 424 for item in results)
    assert num_answers > REQUESTS // 10
