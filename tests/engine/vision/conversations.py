"""Conversations about pictures, answered by transformers' `generate` and by an engine."""

from __future__ import annotations

import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Processor,
    Idefics3Processor,
)

from core.images import ImageFile, ReadImages
from core.protocol.messages import EncodedPrompt, Submit
from core.sampling import Finish
from engine import SamplingParams
from engine.vision.families import VISION_FAMILIES
from engine.vision.image_file import read_image
from engine.vision.parts import image_parts
from engine.vision.reader import ImageReader
from tests.engine.vision.models import in_text, picture

NUM_NEW = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
SMALL = {
    "dtype": "fp32",
    "block_size": 4,
    "max_rolling_batch_prefill_tokens": 10,
    "max_rolling_batch_size": 6,
}
CONVERSATIONS = {
    "u:which <image> is <image>?;a:": (1, 2),
    "u:one word;a:": (),
    "u:<image>;a:": (3,),
    "u:a longer text without any picture, which is computed in chunks;a:": (),
    "u:which <image> is <image> now?;a:": (2, 1),
}
"""Texts and the seeds of their pictures."""


def shot(seed):
    """Return a picture; only those of seed 1 are square."""
    return picture(seed, 32, 32 if seed == 1 else 16)


WITHOUT_TORCHVISION = {"grid": {}, "rows": {"patch_size": 8}, "crops": {"crop_to_patches": True}}
"""Options of the processors of images, where transformers' processor of texts cannot be had."""


def generate(path, text, seeds):
    """Return the tokens of transformers' `generate`, with the inputs of its own processors."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    images = [read_image(shot(seed), "", 10**6) for seed in seeds]
    processor = VISION_FAMILIES[model.config.model_type].processor
    if processor in WITHOUT_TORCHVISION:
        inputs = {"input_ids": torch.tensor([read(path, text, seeds).token_ids])}
        if images:
            options = WITHOUT_TORCHVISION[processor]
            inputs |= AutoImageProcessor.from_pretrained(path)(
                images, return_tensors="pt", **options
            )
            inputs.pop("num_patches", None)
        if images and processor == "grid":
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).int()
    else:
        kind = Gemma3Processor if model.config.model_type == "gemma3" else Idefics3Processor
        inputs = kind.from_pretrained(path)(
            text=[in_text(model.config.model_type, text)],
            images=[images] if images else None,
            add_special_tokens=False,
            return_tensors="pt",
        )
    ids = model.generate(
        **inputs, max_new_tokens=NUM_NEW, eos_token_id=None, do_sample=False, pad_token_id=0
    )
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def read(path, text, seeds):
    files = tuple(ImageFile("messages", shot(seed)) for seed in seeds)
    text = in_text(path.name.removesuffix("-wide"), text)
    if files:
        return ImageReader(path).read(ReadImages(text, files, add_special_tokens=False))
    tokenizer = AutoTokenizer.from_pretrained(path)
    return EncodedPrompt(tokenizer(text, add_special_tokens=False)["input_ids"])


def prompts(path):
    return [read(path, text, seeds) for text, seeds in CONVERSATIONS.items()]


def add(engine, prompt, params, parts=()):
    """Add a prompt as the server does."""
    message = Submit("", prompt.token_ids, params, images=prompt.images)
    images = image_parts(message, engine.facts, engine.parts_in_use)
    return engine.add(prompt.token_ids, params, 0.0, (*images, *parts))


def answers(llm, given, params=GREEDY, parts=()):
    """Run prompts together; return each one's tokens, or the reason of its failure."""
    engine = llm.llm_engine
    ids = [add(engine, prompt, params, parts) for prompt in given]
    results = {id: [] for id in ids}
    while engine.has_work():
        for output in engine.step(0.0):
            results[output.request_id] += output.token_ids
            if output.finish is Finish.ERROR:
                results[output.request_id] = output.failure
    return [results[id] for id in ids]
