"""Requests with images that are refused, or that fail alone."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from core.configuration.limits import IMAGES_IN_USE
from core.errors import OverloadedError, RequestError
from core.protocol.messages import EncodedPrompt
from engine import LLM
from tests.engine.vision.conversations import GREEDY, SMALL, answers, prompts, read
from tests.escaping import ESCAPING


def test_requests_that_the_engine_refuses(vision_model, tiny_model, monkeypatch):
    path = vision_model()
    prompt = read(path, "u:<image>;a:", (1,))
    with pytest.raises(RequestError, match="takes no images"):
        answers(LLM(tiny_model("llama"), dtype="fp32"), [EncodedPrompt([1] * 90, prompt.images)])
    llm = LLM(path, num_kv_blocks=400, **SMALL)
    with pytest.raises(RequestError, match="cannot cut a prompt with images"):
        answers(llm, [prompt], msgspec.structs.replace(GREEDY, truncate_prompt_tokens=8))
    monkeypatch.setattr("engine.vision.parts.IMAGES_IN_USE", replace(IMAGES_IN_USE, maximum=10))
    with pytest.raises(OverloadedError, match="images in use"):
        answers(llm, [prompt])


def test_offline_conversations_have_no_images(vision_model, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    llm = LLM(vision_model(), num_kv_blocks=400, **SMALL, chat_template=str(template))
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
    with pytest.raises(RequestError, match="only text is supported"):
        llm.chat([{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])


def test_an_image_that_fails_ends_its_request_alone(vision_model, expected):
    path = vision_model()
    llm = LLM(path, batching="paged", num_kv_blocks=400, **SMALL)
    given = prompts(path)
    broken = given[2].images[0]
    wrong = msgspec.structs.replace(broken, num_tokens=3, digest=b"wrong")
    given[2] = msgspec.structs.replace(given[2], images=(wrong,))
    results = answers(llm, given)
    assert "4 embeddings for 3 tokens" in results[2]
    assert results[:2] + results[3:] == expected()[:2] + expected()[3:]


@pytest.mark.parametrize("kind", ESCAPING)
def test_a_panic_of_the_encoder_ends_its_request_alone(vision_model, expected, monkeypatch, kind):
    path = vision_model()
    llm = LLM(path, batching="paged", num_kv_blocks=400, **SMALL)
    given = prompts(path)
    encoder = llm.llm_engine.executor.passes.model.encoder
    usual, failing = encoder._encode, given[2].images[0].digest

    def encode(image):
        if image.digest == failing:
            raise kind("why")
        return usual(image)

    monkeypatch.setattr(encoder, "_encode", encode)
    results = answers(llm, given)
    assert f"{kind.__name__}: why" in results[2]
    assert results[:2] == expected()[:2]
