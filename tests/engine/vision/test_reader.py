"""The reader of texts with images: the tokens that stand for an image, and those around it."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from core.errors import RequestError
from core.images import ImageFile, ReadImages
from engine.vision.reader import ImageReader
from tests.engine.vision.conversations import read
from tests.engine.vision.models import picture
from tests.escaping import ESCAPING


def test_internvls_crops_stand_between_two_tokens(vision_model):
    path = vision_model("internvl")
    prompt = read(path, "u:<image>,", (1,))
    run = "<image>" * 4 * len(prompt.images)
    ids = AutoTokenizer.from_pretrained(path)(f"u:<begin>{run}<end>,", add_special_tokens=False)
    assert prompt.token_ids == ids["input_ids"]
    assert len(prompt.images) > 1


def test_a_token_of_text_ends_each_row_of_mistrals_images(vision_model):
    path = vision_model("mistral3")
    prompt = read(path, "u:<image>,<image>", (1, 2))
    rows = "<image><image><image><image>"
    wide = f"{rows}<break>{rows}<end>"
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = f"u:{rows}<break>{rows}<break>{wide},{wide}"
    assert prompt.token_ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [(image.start, image.num_tokens, image.end) for image in prompt.images] == [
        (2, 16, 21),
        (23, 8, 32),
    ]


def test_an_image_of_the_wrong_shape_is_refused(vision_model):
    files = (ImageFile("messages", picture(1, 1, 300)),)
    with pytest.raises(RequestError, match="refuses the images: absolute aspect ratio"):
        ImageReader(vision_model("qwen3_vl")).read(ReadImages("<image>", files, False))


@pytest.mark.parametrize("kind", ESCAPING)
def test_a_panic_of_the_processor_refuses_the_images(vision_model, monkeypatch, kind):
    reader = ImageReader(vision_model())

    def fail(*arguments, **keywords):
        raise kind("why")

    monkeypatch.setattr(reader, "_processor", fail)
    with pytest.raises(RequestError, match=f"refuses the images: {kind.__name__}: why"):
        reader.read(ReadImages("a", (), add_special_tokens=False))
