"""Images in conversations, from the request to the message for the engine."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient
from PIL import Image

from container.front_end.app import create_app
from container.isolation.helper import Helper
from container.wire.engine_client import EngineClient
from core.configuration.limits import IMAGE_BYTES, IMAGES
from core.configuration.options import Options
from core.images import ImageFile, ReadImages
from core.protocol.messages import Submit
from core.structured_outputs import StructuredOutputsParams
from core.text.template_files import load_chat_template
from core.text.tokenizer import Tokenizer
from tests.container.conftest import eventually
from tests.container.fake_engine import FACTS, FakeEngine, says
from tests.engine.vision.models import EOS, picture, save_vision_model

Ask = Callable[..., Any]
"""Posts a chat request; returns the status and the JSON of the response."""
Json = dict[str, Any]
API = Callable[..., tuple[str, Json]]
"""Returns the path and the body of a request whose only message has these parts."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision"), "idefics3")


@pytest.fixture(scope="module")
def reader(model_dir: Path) -> Iterator[Helper]:
    """A helper whose processes start before the tests, so that no leak check reports them."""
    template = load_chat_template(model_dir, None)
    assert template is not None
    helper = Helper(model_dir, template.source)
    helper.grammar(StructuredOutputsParams(regex="a"), (EOS,))
    helper.read_media(ReadImages("<image>", (ImageFile("", picture(1)),), False))
    yield helper
    helper.close()


@pytest.fixture
def vision(
    endpoint: str, engine: FakeEngine, model_dir: Path, reader: Helper
) -> Iterator[FlaskClient]:
    """A server with a model that takes images."""
    engine.facts = msgspec.structs.replace(
        FACTS, takes_images=True, max_model_len=512, vocab_size=300, eos_token_ids=(EOS,)
    )
    engine.script = says([72, EOS])
    client = EngineClient(endpoint, heartbeat_timeout_s=60)
    eventually(lambda: client.health().healthy)
    template = load_chat_template(model_dir, None)
    app = create_app(client, Tokenizer(model_dir), Options(), "demo", template, helper=reader)
    yield app.test_client()
    client.close()


@pytest.fixture
def ask(vision: FlaskClient) -> Ask:
    def ask(*parts: object, **fields: object) -> tuple[int, Any]:
        messages = [{"role": "user", "content": list(parts)}]
        body = {"messages": messages, "max_tokens": 4, **fields}
        response = vision.post("/v1/chat/completions", json=body)
        return response.status_code, response.get_json()

    return ask


def image(data: bytes, kind: str = "png") -> dict[str, object]:
    return url(f"data:image/{kind};base64,{base64.b64encode(data).decode()}")


def url(text: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": text}}


def blank(width: int, height: int) -> bytes:
    """Return a small file of many pixels."""
    file = io.BytesIO()
    Image.new("L", (width, height)).save(file, "PNG")
    return file.getvalue()


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


def test_images_become_image_tokens_and_tensors(ask: Ask, engine: FakeEngine) -> None:
    status, answer = ask(
        text("is "), image(picture(1)), image(picture(2, kind="JPEG"), "jpeg"), text("?")
    )
    assert status == 200
    (submit,) = engine.of_type(Submit)
    assert isinstance(submit, Submit)
    assert answer["usage"]["prompt_tokens"] == len(submit.prompt_token_ids)
    assert [tile.num_tokens for tile in submit.images] == [4] * 10, (
        "each picture gives four tiles and one of the whole"
    )
    image_token = submit.prompt_token_ids[submit.images[0].start]
    places = [at for at, id in enumerate(submit.prompt_token_ids) if id == image_token]
    assert places == [at for tile in submit.images for at in range(tile.start, tile.end)]
    assert len({tile.digest for tile in submit.images}) == 10
    assert submit.images[0].inputs["pixel_values"].shape == (1, 1, 3, 16, 16)


def test_the_same_picture_has_the_same_digests(ask: Ask, engine: FakeEngine) -> None:
    for kind in ("PNG", "PNG", "WEBP"):
        assert ask(image(picture(3, kind=kind)))[0] == 200
    first, second, lossy = (
        [tile.digest for tile in submit.images]
        for submit in engine.of_type(Submit)
        if isinstance(submit, Submit)
    )
    assert first == second
    assert first != lossy


def test_chats_without_images_still_work(ask: Ask, engine: FakeEngine) -> None:
    assert ask(text("hello"))[0] == 200
    (submit,) = engine.of_type(Submit)
    assert isinstance(submit, Submit)
    assert len(submit.prompt_token_ids) == len("user:hello;a:")
    assert submit.images == ()


BAD = [
    (url("https://example.org/cat.png"), "addresses are not fetched"),
    (url("file:///etc/passwd"), "expected a PNG, JPEG or WebP image"),
    (url("data:image/gif;base64,R0lG"), "expected a PNG, JPEG or WebP image"),
    (url("data:image/png;base64,!"), "is not valid base64"),
    (image(b"no image"), "is not an image in PNG or JPEG or WEBP"),
    (image(picture(1)[:200]), "is not an image in PNG or JPEG or WEBP"),
    (image(blank(8000, 4195)), "has more than 33554432 pixels"),
    ({"type": "image_url"}, "expected a PNG, JPEG or WebP image"),
]


@pytest.mark.parametrize(("part", "why"), BAD, ids=[why for _, why in BAD])
def test_images_that_are_refused(ask: Ask, part: object, why: str) -> None:
    status, answer = ask(text("see"), part)
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[1].image_url.url")
    assert why in answer["error"]["message"]


@pytest.mark.parametrize("data", [b"not TIFF", b"MM\0*"])
def test_broken_exif_data_is_ignored(ask: Ask, engine: FakeEngine, data: bytes) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG", exif=data)
    status, _ = ask(image(file.getvalue()))
    assert (status, len(engine.of_type(Submit))) == (200, 1)


def test_the_number_and_the_size_of_images_are_limited(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, answer = ask(*[image(b"x")] * (IMAGES.maximum + 1))
    assert (status, "has 33 images" in answer["error"]["message"]) == (400, True)
    small = replace(IMAGE_BYTES, maximum=100)
    monkeypatch.setattr("container.apis.generation.media.IMAGE_BYTES", small)
    status, answer = ask(image(picture(1)))
    assert (status, "at most 100 are allowed" in answer["error"]["message"]) == (400, True)


def test_an_image_token_in_a_text_is_refused(ask: Ask) -> None:
    """The model's processor would take this token for the place of the image."""
    status, answer = ask(text("<image>"), image(picture(1)))
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "the model's processor refuses the images" in answer["error"]["message"]


def in_chat(*parts: bytes | str) -> tuple[str, Json]:
    content = [text(part) if isinstance(part, str) else image(part) for part in parts]
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}


def block(part: bytes | str) -> Json:
    """Return a block of Anthropic's Messages API."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    data = base64.b64encode(part).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source}


def in_messages(*parts: bytes | str) -> tuple[str, Json]:
    messages = [{"role": "user", "content": [block(part) for part in parts]}]
    return "/v1/messages", {"messages": messages, "max_tokens": 4}


def item_part(part: bytes | str) -> Json:
    """Return a part of an input item of OpenAI's Responses API."""
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    data = f"data:image/png;base64,{base64.b64encode(part).decode()}"
    return {"type": "input_image", "image_url": data, "detail": "auto"}


def in_responses(*parts: bytes | str) -> tuple[str, Json]:
    items = [{"role": "user", "content": [item_part(part) for part in parts]}]
    return "/v1/responses", {"input": items}


APIS: tuple[API, ...] = (in_chat, in_messages, in_responses)


def test_every_api_makes_the_same_prompt(vision: FlaskClient, engine: FakeEngine) -> None:
    for api in APIS:
        path, body = api("is ", picture(1), picture(2), "?")
        response = vision.post(path, json=body)
        assert response.status_code == 200, response.text
    chat, messages, responses = map(submitted, engine.of_type(Submit))
    assert chat == messages == responses
    assert len(chat[1]) == 10


def submitted(submit: object) -> tuple[list[int], list[bytes]]:
    """Return the prompt's tokens, and the digest of each of its images' tiles."""
    assert isinstance(submit, Submit)
    return list(submit.prompt_token_ids), [tile.digest for tile in submit.images]


def test_results_of_tools_may_have_images(vision: FlaskClient, engine: FakeEngine) -> None:
    call = {"name": "look", "arguments": "{}"}
    calls = [{"id": "1", "type": "function", "function": call}]
    asked: Any = [
        ("/v1/chat/completions", {"messages": [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": [text("see"), image(picture(1))]}]}),
        ("/v1/messages", {"max_tokens": 4, "messages": [
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
                "content": [block("see"), block(picture(1))]}]}]}),
        ("/v1/responses", {"input": [
            {"type": "function_call", "call_id": "1", **call},
            {"type": "function_call_output", "call_id": "1",
             "output": [item_part("see"), item_part(picture(1))]}]}),
    ]  # fmt: skip
    for path, body in asked:
        response = vision.post(path, json=body)
        assert response.status_code == 200, response.text
    chat, messages, responses = map(submitted, engine.of_type(Submit))
    assert chat == messages == responses
    assert len(chat[1]) == 5


def test_an_image_in_a_tool_result_moves_with_it(vision: FlaskClient, engine: FakeEngine) -> None:
    """A tool's result is put before the other blocks of its message, and the image in the result
    moves with it.
    """
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block(picture(2))]}
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    for blocks in ([block(picture(1)), result], [result, block(picture(1))]):
        messages = [{"role": "assistant", "content": [use]}, {"role": "user", "content": blocks}]
        assert vision.post("/v1/messages", json={"max_tokens": 4, "messages": messages}).json
    mixed, ordered = map(submitted, engine.of_type(Submit))
    assert mixed == ordered


def test_images_count_as_tokens(vision: FlaskClient) -> None:
    path, body = in_messages("is ", picture(1))
    answered = vision.post(path, json=body).get_json()["usage"]["input_tokens"]
    del body["max_tokens"]
    counted = vision.post("/v1/messages/count_tokens", json=body).get_json()
    assert counted == {"input_tokens": answered}
    path, body = in_responses("is ", picture(1))
    assert vision.post(path, json=body).get_json()["usage"]["input_tokens"] == answered


def source(**fields: object) -> Json:
    return {"messages": [{"role": "user", "content": [{"type": "image", "source": fields}]}]}


def item(**fields: object) -> Json:
    return {"input": [{"role": "user", "content": [{"type": "input_image", **fields}]}]}


SOURCE = "messages[0].content[0].source"
ITEM = "input[0].content[0]"
BAD_REQUESTS = [
    (source(type="url", url="https://example.org/cat.png"), f"{SOURCE}.url: addresses are not"),
    (source(type="base64", media_type="image/gif", data="R0lG"),
     f"{SOURCE}.media_type: expected one of image/png, image/jpeg, image/webp"),
    (source(type="base64", media_type="image/png", data="!"), f"{SOURCE}.data: is not valid"),
    (source(type="base64", media_type="image/png", data="AAAA"), f"{SOURCE}.data: is not an image"),
    (source(type="file", file_id="f"), f"{SOURCE}: expected the type base64"),
    (item(image_url="https://example.org/cat.png"), f"{ITEM}.image_url: addresses are not"),
    (item(image_url="data:image/png;base64,AAAA"), f"{ITEM}.image_url: is not an image"),
    (item(file_id="f"), f"{ITEM}.image_url: expected a data: URL; no files are stored"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "why"), BAD_REQUESTS, ids=[why for _, why in BAD_REQUESTS])
def test_images_that_other_apis_refuse(vision: FlaskClient, body: Json, why: str) -> None:
    path = "/v1/messages" if "messages" in body else "/v1/responses"
    response = vision.post(path, json=body)
    assert response.status_code == 400
    assert why in response.get_json()["error"]["message"]


def test_a_data_url_as_anthropics_source(vision: FlaskClient, engine: FakeEngine) -> None:
    url = f"data:image/png;base64,{base64.b64encode(picture(1)).decode()}"
    response = vision.post("/v1/messages", json=source(type="url", url=url))
    assert response.status_code == 200
    (submit,) = engine.of_type(Submit)
    assert len(submitted(submit)[1]) == 5


@pytest.mark.parametrize("api", APIS)
def test_the_number_of_images_is_limited(vision: FlaskClient, api: API) -> None:
    path, body = api(*[b"x"] * (IMAGES.maximum + 1))
    response = vision.post(path, json=body)
    assert response.status_code == 400
    assert "has 33 images" in response.get_json()["error"]["message"]


@pytest.mark.parametrize(
    ("api", "field"),
    [
        (in_chat, "messages[0].content[0].image_url.url"),
        (in_messages, f"{SOURCE}.data"),
        (in_responses, f"{ITEM}.image_url"),
    ],
)
def test_models_that_take_no_images_say_so(http: FlaskClient, api: API, field: str) -> None:
    path, body = api(picture(1))
    response = http.post(path, json=body)
    assert response.status_code == 400
    message = response.get_json()["error"]["message"]
    assert message.startswith(f"{field}: ")
    assert "Idefics3, SmolVLM and Qwen2.5-VL do" in message
