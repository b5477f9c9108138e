"""Images in prompts: greedy fp32 tokens equal those of transformers' `generate`."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Processor,
    Idefics3Processor,
    LlavaConfig,
)

from core.configuration.limits import IMAGES_IN_USE
from core.errors import ConfigurationError, OverloadedError, RequestError
from core.images import ImageFile, ReadImages
from core.protocol.messages import EncodedPrompt, Submit
from core.sampling import Finish
from engine import LLM, SamplingParams
from engine.attention.backends import CpuBackend
from engine.loading import image_encoder
from engine.memory.capacity import activation_bytes, input_attention_bytes
from engine.vision.families import VISION_FAMILIES
from engine.vision.image_file import read_image
from engine.vision.parts import image_parts
from engine.vision.reader import ImageReader
from kernels.cpu.shared_library import unavailable_reason
from strategies.speculation.speculation import Speculation
from tests.engine.greedy_answers import STRATEGIES
from tests.engine.quantized_checkpoints import FORMATS, write_quantized
from tests.engine.ranks.engines import ranked_engine
from tests.engine.vision_models import in_text, picture, save_vision_model
from tests.escaping import ESCAPING

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


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    """Return a function (model_type, is_wide=False) → folder of a model that takes images."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("vision")
    return lambda model_type="idefics3", **settings: save_vision_model(
        folder, model_type, **settings
    )


@pytest.fixture(scope="module")
def expected(vision_model):
    """Return a function (model_type, is_wide=False) → the answers of `generate`."""
    known = {}

    def answers_of(model_type="idefics3", **settings):
        path = vision_model(model_type, **settings)
        if path not in known:
            known[path] = [generate(path, text, seeds) for text, seeds in CONVERSATIONS.items()]
        return known[path]

    return answers_of


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


def add(engine, prompt, params):
    """Add a prompt as the server does."""
    message = Submit("", prompt.token_ids, params, images=prompt.images)
    parts = image_parts(message, engine.facts, engine.parts_in_use)
    return engine.add(prompt.token_ids, params, 0.0, parts)


def answers(llm, given, params=GREEDY):
    """Run prompts together; return each one's tokens, or the reason of its failure."""
    engine = llm.llm_engine
    ids = [add(engine, prompt, params) for prompt in given]
    results = {id: [] for id in ids}
    while engine.has_work():
        for output in engine.step(0.0):
            results[output.request_id] += output.token_ids
            if output.finish is Finish.ERROR:
                results[output.request_id] = output.failure
    return [results[id] for id in ids]


PAGED_BLOCKS = {"gemma3": 24}
"""Blocks with which `paged` has to preempt, although it frees those that left a window."""


@pytest.mark.matrix(cases=5)
@pytest.mark.parametrize("batching", STRATEGIES)
@pytest.mark.parametrize("model_type", VISION_FAMILIES)
def test_tokens_equal_transformers(vision_model, expected, model_type, batching):
    """Prompts run in chunks of 10 tokens, beside texts without images, and `paged` preempts."""
    path = vision_model(model_type)
    llm = LLM(
        path,
        batching=batching,
        num_kv_blocks=PAGED_BLOCKS.get(model_type, 44) if batching == "paged" else 400,
        **SMALL,
        **STRATEGIES[batching],
    )
    assert llm.facts.takes_images
    assert answers(llm, prompts(path)) == expected(model_type)
    if batching == "paged":
        assert llm.llm_engine.strategy.num_preemptions > 0
    assert llm.llm_engine.strategy.memory.num_held_blocks == 0


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("model_type", ["mistral3", "qwen3_vl"])
@pytest.mark.parametrize(("mode", "step"), [("swap", 7), ("recompute", 9)])
def test_preempted_images_in_odd_chunks(vision_model, expected, model_type, mode, step):
    path = vision_model(model_type)
    options = SMALL | {"max_rolling_batch_prefill_tokens": step, "preemption_mode": mode}
    llm = LLM(path, batching="paged", num_kv_blocks=30, **options)
    assert answers(llm, prompts(path)) == expected(model_type)
    strategy = llm.llm_engine.strategy
    assert strategy.num_preemptions > 0
    assert (strategy.num_swaps > 0) is (mode == "swap")


@pytest.mark.usefixtures("exact_rows")
@pytest.mark.parametrize(
    ("model_type", "name"), [("mistral3", "fp8 whole, static"), ("qwen3_vl", "awq")]
)
def test_quantized_checkpoints(vision_model, tmp_path, model_type, name):
    """Of Mistral 3's, the image encoder is quantized as well."""
    quantized, plain = write_quantized(vision_model(model_type), tmp_path, FORMATS[name])
    llm = LLM(quantized, num_kv_blocks=400, **SMALL)
    assert llm.facts.quantization == FORMATS[name].config["quant_method"]
    expected = [generate(plain, text, seeds) for text, seeds in CONVERSATIONS.items()]
    assert answers(llm, prompts(quantized)) == expected


@pytest.mark.parametrize("model_type", VISION_FAMILIES)
def test_the_images_matter(expected, model_type):
    given = expected(model_type)
    assert given[0] != given[4]
    assert len({tuple(answer) for answer in given}) == len(CONVERSATIONS)


@pytest.mark.parametrize("model_type", ["gemma3", "mistral3", "qwen3_vl"])
def test_several_ranks(vision_model, expected, monkeypatch, model_type):
    """Rank 0 encodes images, and the others repeat what it does with the embeddings."""
    lock, load = threading.Lock(), image_encoder.load_image_encoder

    def load_alone(*arguments):
        with lock:  # transformers patches its classes meanwhile; these ranks are threads
            return load(*arguments)

    monkeypatch.setattr(image_encoder, "load_image_encoder", load_alone)
    path = vision_model(model_type)
    with ranked_engine(path, 2, num_kv_blocks=44, **SMALL) as (engine, _):
        assert answers(SimpleNamespace(llm_engine=engine), prompts(path)) == expected(model_type)


@pytest.mark.parametrize("model_type", ["gemma3", "idefics3", "qwen3_vl"])
def test_the_cpu_kernels_and_overlapping_steps(vision_model, expected, model_type):
    path = vision_model(model_type, is_wide=True)
    llm = LLM(path, num_kv_blocks=44, async_scheduling=True, **SMALL)
    assert answers(llm, prompts(path)) == expected(model_type, is_wide=True)
    assert isinstance(llm.llm_engine.executor.passes.backend, CpuBackend) or unavailable_reason()


@pytest.mark.parametrize("model_type", ["gemma3", "idefics3", "mistral3", "qwen3_vl"])
def test_prefixes_are_shared_only_between_equal_images(vision_model, model_type):
    """A block of the prefix cache ends after three of the four tokens of Gemma 3's image."""
    path = vision_model(model_type)
    llm = LLM(path, batching="paged", num_kv_blocks=400, **SMALL)
    text = "u:<image> and a question;a:"
    one, other = read(path, text, (2,)), read(path, text, (3,))
    assert one.token_ids == other.token_ids
    [first] = answers(llm, [one])
    strategy = llm.llm_engine.strategy
    [second] = answers(llm, [other])
    # Where windows are freed, only a prompt's third request finds what the second one parted from.
    has_windows = model_type == "gemma3"
    before_image = one.images[0].start // 4 * 4
    assert strategy.num_prefix_hits == (0 if has_windows else before_image)
    for _ in range(2):
        assert answers(llm, [one, other]) == [first, second]
    assert first != second
    block = 8 if has_windows else 4
    assert strategy.num_prefix_hits >= (2 if has_windows else 4) * (len(one.token_ids) - block)


def test_samples_of_a_prompt_share_its_images(vision_model, expected):
    path = vision_model()
    llm = LLM(path, batching="paged", num_kv_blocks=400, **SMALL)
    params = msgspec.structs.replace(GREEDY, n=2)
    [both] = answers(llm, prompts(path)[:1], params)
    assert sorted(both) == sorted(2 * expected()[0])


@pytest.mark.parametrize("batching", STRATEGIES)
def test_a_prompt_that_ends_with_an_image(vision_model, batching):
    """The prompt's last token does not run alone in a step, because it belongs to the image."""
    path = vision_model("gemma3")
    prompt = prompts(path)[2]
    ends = msgspec.structs.replace(prompt, token_ids=prompt.token_ids[: prompt.images[0].end])
    llm = LLM(path, batching=batching, num_kv_blocks=400, **SMALL, **STRATEGIES[batching])
    [one] = answers(llm, [ends])
    assert len(one) == NUM_NEW
    [both] = answers(llm, [ends], msgspec.structs.replace(GREEDY, n=2))
    assert sorted(both) == sorted(2 * one)
    beams = SamplingParams(num_beams=2, max_tokens=4, ignore_eos=True, temperature=0)
    assert len(answers(llm, [ends], beams)[0]) == 4


@pytest.mark.parametrize("max_rows", [3, 5])
def test_scores_of_a_prompt_do_not_divide_an_image(vision_model, expected, monkeypatch, max_rows):
    path = vision_model("gemma3")
    monkeypatch.setattr("engine.scores.column.MAX_SCORED_ROWS", max_rows)
    llm = LLM(path, num_kv_blocks=400, **SMALL)
    params = msgspec.structs.replace(GREEDY, prompt_logprobs=1)
    assert answers(llm, prompts(path), params) == expected("gemma3")


def test_a_step_has_room_for_an_image_beside_all_sequences(vision_model):
    small = SMALL | {"max_rolling_batch_prefill_tokens": 6}
    facts = LLM(vision_model("gemma3"), num_kv_blocks=400, **small).facts
    assert facts.max_step_tokens == facts.max_sequences + 4 == 10
    assert any("up to 10 tokens, not 6" in note for note in facts.notes)
    facts = LLM(vision_model(), num_kv_blocks=400, **small).facts
    assert facts.max_step_tokens == 6, "other models' images may be divided"


def test_memory_for_attention_within_images(vision_model):
    model = LLM(vision_model("gemma3"), num_kv_blocks=400, **SMALL).llm_engine.executor.passes.model
    numbers_of_a_token = 2 * 2 * 8  # K and V of two heads
    assert input_attention_bytes(model, 100, torch.float32) == 100 * (4 * numbers_of_a_token + 4)
    assert input_attention_bytes(model, 100, torch.uint8) == 100 * (5 * numbers_of_a_token + 4)
    other = LLM(vision_model(), num_kv_blocks=400, **SMALL).llm_engine.executor.passes.model
    assert input_attention_bytes(other, 100, torch.float32) == 0


def test_embeddings_are_kept_for_each_salt(vision_model):
    path = vision_model()
    llm = LLM(path, batching="paged", num_kv_blocks=400, **SMALL)
    encoder, image = llm.llm_engine.executor.passes.model.encoder, prompts(path)[0].images[0]
    assert encoder(image, "one tenant") is encoder(image, "one tenant")
    assert encoder(image, "another") is not encoder(image, "one tenant")
    assert torch.equal(encoder(image, "another"), encoder(image, "one tenant"))


def test_offline_conversations_have_no_images(vision_model, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    llm = LLM(vision_model(), num_kv_blocks=400, **SMALL, chat_template=str(template))
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
    with pytest.raises(RequestError, match="only text is supported"):
        llm.chat([{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])


def test_dropped_embeddings_are_computed_again(vision_model, expected, monkeypatch):
    path = vision_model()
    monkeypatch.setattr("engine.vision.encoder.MAX_KEPT_TOKENS", 0)
    llm = LLM(path, batching="continuous", num_kv_blocks=400, **SMALL)
    assert answers(llm, prompts(path)) == expected()


def test_both_names_of_the_language_models_tensors(vision_model, expected, tmp_path):
    """Some versions of transformers save tensors under other names: the paths of its modules."""
    path = shutil.copytree(vision_model("qwen2_5_vl"), tmp_path / "renamed")
    tensors = load_file(path / "model.safetensors")
    assert any(name.startswith("model.layers.") for name in tensors)
    renamed = {_module_name(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / "model.safetensors", {"format": "pt"})
    assert answers(LLM(path, num_kv_blocks=400, **SMALL), prompts(path)) == expected("qwen2_5_vl")


def _module_name(name):
    if name.startswith("model."):
        return name.replace("model.", "model.language_model.", 1)
    return f"model.{name}" if name.startswith("visual.") else name


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


@pytest.mark.parametrize("kind", ESCAPING)
def test_a_panic_of_the_processor_refuses_the_images(vision_model, monkeypatch, kind):
    reader = ImageReader(vision_model())

    def fail(*arguments, **keywords):
        raise kind("why")

    monkeypatch.setattr(reader, "_processor", fail)
    with pytest.raises(RequestError, match=f"refuses the images: {kind.__name__}: why"):
        reader.read(ReadImages("a", (), add_special_tokens=False))


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


def test_images_exclude_the_library(vision_model):
    with pytest.raises(ConfigurationError, match="takes images and only runs packed"):
        LLM(vision_model(), dtype="fp32", executor="library")


def test_without_images_the_language_model_is_served(vision_model, expected):
    path = vision_model("qwen3_vl")
    llm = LLM(path, decoder="transformers", num_kv_blocks=400, **SMALL)
    why = "images are refused (option.decoder=transformers cannot embed them)"
    assert f"the language model of qwen3_vl; {why}" in llm.facts.decoder
    given, answered = prompts(path), expected("qwen3_vl")
    assert answers(llm, [given[1], given[3]]) == [answered[1], answered[3]]
    with pytest.raises(RequestError, match="unless the start says that images are refused"):
        answers(llm, given[:1])


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


def test_the_error_for_another_image_model_names_those_that_work(tmp_path):
    size = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config={"model_type": "persimmon", "vocab_size": 50, "num_hidden_layers": 1, **size},
        vision_config={"num_hidden_layers": 1, "image_size": 16, "patch_size": 4, **size},
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigurationError, match="supports only gemma3, idefics3, smolvlm, qwen2_vl"
    ):
        LLM(tmp_path, dtype="fp32")


def test_steps_leave_memory_for_the_encoder(vision_model):
    model = LLM(vision_model(), num_kv_blocks=400, **SMALL).llm_engine.executor.passes.model
    shapes = []

    def measure(work, device):
        shapes.append(work().shape)
        return 100 * len(shapes)

    total = activation_bytes(model, 20, 7, lambda call, num_sequences: 0, None, measure)
    assert shapes == [(7,), (4, 32)], "a token for each sequence, embeddings of a tile"
    assert total == 200 + model.encoder.max_kept_bytes


def test_answers_about_images_have_drafts(vision_model, expected):
    llm = LLM(
        vision_model(),
        speculative_method="suffix",
        speculation="always",
        num_kv_blocks=120,
        **SMALL,
    )
    for _ in range(2):
        assert answers(llm, prompts(vision_model())) == expected()
    extension = llm.llm_engine.strategy.extension
    assert isinstance(extension, Speculation)
    assert extension.counts.num_accepted > 0
