"""Image and video tasks: their answers, and that no request can open files."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForUniversalSegmentation, Mask2FormerConfig, pipeline
from transformers.models.sam import image_processing_pil_sam as sam

from core.configuration.pipeline_tasks import PIPELINE_TASKS
from core.errors import ConfigurationError, RequestError
from engine.tasks import loading
from engine.tasks.pipelines import inputs
from engine.tasks.pipelines import model as pipeline_model
from engine.tasks.pipelines.video import MAX_PIXELS, read_video
from tests.engine.tasks.bodies import (
    as_transformers_wants_it,
    body,
    close,
    plain,
    video,
    wav,
    with_files_read,
)
from tests.engine.tasks.conftest import decoded, engine_of, perform


def noise(seed, size=(32, 24)):
    data = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def pair(first, second):
    return {"images": [noise(first), noise(second)]}


PANOPTIC = {"threshold": 0.1, "mask_threshold": 0.1, "overlap_mask_area_threshold": 0.0}
REQUESTS = [
    ("segmenter", "image-segmentation", [
        body(noise(1)), body([noise(2), noise(3, (40, 30))]), body(noise(1), subtask="semantic"),
    ]),
    ("panoptic_segmenter", "image-segmentation", [
        body(noise(1), **PANOPTIC), body([noise(2, (24, 32))], subtask="instance", **PANOPTIC),
    ]),
    ("depth_estimator", "depth-estimation", [body(noise(1)), body([noise(2), noise(3, (24, 24))])]),
    ("matcher", "keypoint-matching", [
        body(pair(1, 2)), body([pair(1, 1), pair(2, 3)]), body(pair(1, 2), threshold=0.01),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "task", "requests"), REQUESTS)
def test_answers_equal_those_of_transformers(task_model, name, task, requests):
    path = task_model(name)
    engine = engine_of(path)
    assert engine.facts.task == task
    reference = pipeline(task, model=str(path), dtype=torch.float32, device="cpu")
    for request, outcome in zip(requests, perform(engine, *requests), strict=True):
        read = as_transformers_wants_it(request.inputs)
        given = [value["images"] if isinstance(value, dict) else value for value in read]
        expected = [plain(reference(value, **request.parameters)) for value in given]
        assert any(expected), "the reference result is not empty"
        got = with_files_read(decoded(outcome))
        assert close(got, expected if request.is_batch else expected[0])


def test_depth_is_computed_in_fp32(task_model, caplog):
    """bf16 is the default on a GPU, and numpy has no bf16."""
    engine = engine_of(task_model("depth_estimator"), dtype="bf16")
    assert engine.facts.dtype == "float32"
    assert "runs in fp32" in caplog.text
    (outcome,) = perform(engine, body(noise(1)))
    assert np.array(decoded(outcome)["predicted_depth"]).shape == (24, 32)


def test_masks_are_png_files_of_the_images_size(task_model):
    (outcome,) = perform(engine_of(task_model("segmenter")), body(noise(1)))
    masks = [np.array(with_files_read(segment["mask"])) for segment in decoded(outcome)]
    assert {mask.shape for mask in masks} == {(24, 32)}
    np.testing.assert_array_equal(sum(masks), 255)  # each pixel is in exactly one mask


def test_an_invalid_image_fails_alone(task_model):
    engine = engine_of(task_model("segmenter"))
    outcomes = perform(
        engine, body([noise(1), b"GIF"]), body(noise(1)), body(noise(1), subtask="panoptic")
    )
    good, bad = decoded(outcomes[0])
    assert good == decoded(outcomes[1])
    assert (bad["code"], bad["field"]) == (400, "inputs")
    assert isinstance(outcomes[2], RequestError)


def test_images_with_too_many_pixels_are_rejected(task_model, monkeypatch):
    """The limit is lower for tasks that answer with per-pixel maps."""
    masked = body(noise(1))
    monkeypatch.setattr(inputs, "MAX_MAPPED_PIXELS", 32 * 24 - 1)
    segmented, classified = (
        perform(engine_of(task_model(name)), masked)[0] for name in ("segmenter", "viewer")
    )
    assert "more than 767 pixels" in str(segmented)
    assert decoded(classified)
    monkeypatch.setattr(inputs, "MAX_PIXELS", 32 * 24 - 1)
    (classified,) = perform(engine_of(task_model("viewer")), masked)
    assert (classified.field, "pixels" in str(classified)) == ("inputs", True)


def test_keypoint_matching_needs_two_images(task_model):
    engine = engine_of(task_model("matcher"))
    three = {"images": [noise(1)] * 3}
    (outcome,) = perform(engine, body(three))
    assert (outcome.field, "two images" in str(outcome)) == ("inputs.images", True)


class TestMasks:
    """One call of transformers needs torchvision, which is not installed. It is patched here."""

    @pytest.fixture
    def without_torchvision(self, monkeypatch):
        def all_of_them(_, masks, scores, boxes, threshold):
            return [sam._rle_to_mask(mask) for mask in masks], scores, masks, boxes

        monkeypatch.setattr(
            sam.SamImageProcessorPil, "post_process_for_mask_generation", all_of_them
        )
        monkeypatch.setattr(loading, "find_spec", lambda _: True)

    def test_every_mask_is_a_png_file(self, without_torchvision, task_model):
        masked = body(
            noise(1), points_per_crop=2, pred_iou_thresh=-99.0, stability_score_thresh=-1.0,
            output_rle_mask=True, output_bboxes_mask=True,
        )  # fmt: skip
        path = task_model("mask_maker")
        reference = pipeline("mask-generation", model=str(path), device="cpu")
        expected = reference(as_transformers_wants_it(masked.inputs[0]), **masked.parameters)
        (outcome,) = perform(engine_of(path), masked)
        got = with_files_read(decoded(outcome))
        assert close(got, plain(expected))
        assert np.array(got["masks"]).shape[1:] == (24, 32)

    def test_missing_packages_are_reported_at_start(self, task_model, monkeypatch):
        """One of these packages is Pillow, which all image tasks need."""
        monkeypatch.setattr(loading, "find_spec", lambda name: None)
        with pytest.raises(ConfigurationError, match="needs the package PIL: pip install"):
            engine_of(task_model("mask_maker"))
        monkeypatch.setattr(loading, "find_spec", lambda name: name == "PIL" or None)
        with pytest.raises(ConfigurationError, match="torchvision that belongs to this torch"):
            engine_of(task_model("mask_maker"))


class TestVideos:
    def test_answers_equal_those_of_transformers(self, task_model, tmp_path):
        path = task_model("watcher")
        file = tmp_path / "video.mp4"
        file.write_bytes(video(9))
        reference = pipeline("video-classification", model=str(path), device="cpu")
        engine = engine_of(path)
        assert engine.facts.task == "video-classification"
        requests = [body(video(9)), body(video(9), frame_sampling_rate=2, top_k=1)]
        for request, outcome in zip(requests, perform(engine, *requests), strict=True):
            assert close(decoded(outcome), reference(str(file), **request.parameters))

    def test_a_batch_with_invalid_videos(self, task_model):
        engine = engine_of(task_model("watcher"))
        (alone,) = perform(engine, body(video()))
        (outcome,) = perform(engine, body([video(), b"no video", video(3), video()]))
        good, wrong, short, same = decoded(outcome)
        assert close([good, same], [decoded(alone)] * 2)
        assert "not a video" in wrong["error"]
        assert "too short: the model needs 4 frames" in short["error"]

    def test_the_requested_frames_are_read(self):
        frames = read_video(video(9), 9, 1)
        assert (frames.shape, frames.dtype) == ((9, 24, 32, 3), np.uint8)
        np.testing.assert_array_equal(read_video(video(9), 3, 2), frames[[0, 2, 5]])

    def test_a_playlist_opens_no_file(self, tmp_path, monkeypatch):
        """An FFmpeg playlist names other files, which FFmpeg would open."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "part.ts").write_bytes(video(format="mpegts"))
        assert read_video((tmp_path / "part.ts").read_bytes(), 1, 1).any()
        with pytest.raises(RequestError, match="not a video of a known format"):
            read_video(b"ffconcat version 1.0\nfile part.ts\n", 1, 1)

    def test_missing_pyav_is_reported_at_start(self, task_model, monkeypatch):
        monkeypatch.setattr(loading, "find_spec", lambda _: None)
        with pytest.raises(ConfigurationError, match=r"av: pip install 'longshore\[video\]'"):
            engine_of(task_model("watcher"))

    def test_huge_frames_are_rejected(self, monkeypatch):
        assert MAX_PIXELS > 1920 * 1080
        monkeypatch.setattr("engine.tasks.pipelines.video.MAX_PIXELS", 32 * 24 - 1)
        with pytest.raises(RequestError, match="pixels"):
            read_video(video(), 1, 1)


FILE_TASKS = [
    ("segmenter", "image-segmentation", "{}"),
    ("depth_estimator", "depth-estimation", "{}"),
    ("viewer", "image-classification", "{}"),
    ("watcher", "video-classification", "{}"),
    ("hearer", "audio-classification", "{}"),
    ("listener", "automatic-speech-recognition", "{}"),
    ("sound_labeller", "zero-shot-audio-classification", "{}"),
    ("matcher", "keypoint-matching", {"images": ["{}", "{}"]}),
    ("page_reader", "document-question-answering",
     {"image": "{}", "question": "who", "word_boxes": [["cat", [0, 0, 9, 9]]]}),
    ("chatter", "image-text-to-text", {"image": "{}", "text": "<image> who"}),
    ("chatter", "image-text-to-text",
     {"messages": [{"role": "user", "content": [{"type": "image", "image": "{}"}]}]}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "task", "given"), FILE_TASKS)
@pytest.mark.parametrize("scheme", ["", "file://", "http://localhost/"])
def test_a_text_opens_no_file(task_model, tmp_path, name, task, given, scheme):
    """The front end would already reject such a text."""
    path = tmp_path / "file"
    path.write_bytes({"watcher": video(), "hearer": wav(1), "listener": wav(1)}.get(name, noise(1)))

    def named(value):
        match value:
            case "{}":
                return f"{scheme}{path}"
            case list():
                return list(map(named, value))
            case dict():
                return {key: named(item) for key, item in value.items()}
            case _:
                return value

    parameters = {"candidate_labels": ["cat"]} if task.startswith("zero-shot") else {}
    (outcome,) = perform(engine_of(task_model(name), task=task), body(named(given), **parameters))
    assert isinstance(outcome, RequestError)
    assert "expected the bytes" in str(outcome)


def test_every_task_with_files_is_in_the_previous_test():
    on_files = {
        name
        for name, task in PIPELINE_TASKS.items()
        if not {"image", "images", "audio", "video"}.isdisjoint(task.contents)
    }
    alike = {"any-to-any", "object-detection", "zero-shot-object-detection", "mask-generation",
             "zero-shot-image-classification", "image-feature-extraction"}  # fmt: skip
    assert on_files - alike == {task for _, task, _ in FILE_TASKS}


def test_the_model_class_is_that_of_the_architecture():
    class Source:
        config = Mask2FormerConfig(architectures=["Mask2FormerForUniversalSegmentation"])

    chosen = pipeline_model.choose_model_class("image-segmentation", Source())
    assert chosen is AutoModelForUniversalSegmentation
