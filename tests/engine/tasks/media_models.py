"""Tiny random models for images, sounds, videos, documents and tables; see `models.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import (
    ClapConfig,
    ClapFeatureExtractor,
    ClapModel,
    DetrConfig,
    DetrForSegmentation,
    DonutSwinConfig,
    GLPNConfig,
    GLPNForDepthEstimation,
    LayoutLMConfig,
    LayoutLMForQuestionAnswering,
    LayoutLMv3Config,
    LayoutLMv3ForQuestionAnswering,
    LayoutLMv3Tokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    MBartConfig,
    PreTrainedModel,
    ResNetConfig,
    SamConfig,
    SamModel,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SuperGlueConfig,
    SuperGlueForKeypointMatching,
    SuperPointConfig,
    TapasConfig,
    TapasForQuestionAnswering,
    TapasTokenizer,
    VideoMAEConfig,
    VideoMAEForVideoClassification,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    VitsConfig,
    VitsModel,
    VitsTokenizer,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.detr.image_processing_pil_detr import DetrImageProcessorPil
from transformers.models.donut.image_processing_pil_donut import DonutImageProcessorPil
from transformers.models.glpn.image_processing_pil_glpn import GLPNImageProcessorPil
from transformers.models.layoutlmv3.image_processing_pil_layoutlmv3 import (
    LayoutLMv3ImageProcessorPil,
)
from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil
from transformers.models.segformer.image_processing_pil_segformer import SegformerImageProcessorPil
from transformers.models.superglue.image_processing_pil_superglue import SuperGlueImageProcessorPil
from transformers.models.videomae.image_processing_pil_videomae import VideoMAEImageProcessorPil

from tests.engine.tasks.words import BERT, tokenizer

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 16}  # fmt: skip
LLAMA = {**SMALL, "model_type": "llama", "num_key_value_heads": 1}
PYRAMID = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
           "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2],
           "mlp_ratios": [2, 2], "decoder_hidden_size": 8}  # fmt: skip
NUM_FRAMES = 4
CELLS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EMPTY]", "who", "cat", "dog", "1", "2",
         "name", "age"]  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}"
)
LETTERS = ["<pad>", "<unk>", "a", "b", "c", " "]


def segmenter(path: Path) -> None:
    config = SegformerConfig(**PYRAMID, num_labels=3)
    save(SegformerForSemanticSegmentation(config), path)
    SegformerImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(path)


def panoptic_segmenter(path: Path) -> None:
    backbone = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8] * 4,
        depths=[1] * 4,
        layer_type="basic",
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = DetrConfig(use_timm_backbone=False, backbone_config=backbone, d_model=32,
                        encoder_layers=1, encoder_attention_heads=8, encoder_ffn_dim=16,
                        decoder_layers=1, decoder_attention_heads=8, decoder_ffn_dim=16,
                        num_queries=4, num_labels=3)  # fmt: skip
    save(DetrForSegmentation(config), path)
    DetrImageProcessorPil(
        format="coco_panoptic", size={"shortest_edge": 64, "longest_edge": 96}
    ).save_pretrained(path)


def depth_estimator(path: Path) -> None:
    save(GLPNForDepthEstimation(GLPNConfig(**PYRAMID)), path)
    GLPNImageProcessorPil(size_divisor=8).save_pretrained(path)


def mask_maker(path: Path) -> None:
    image = {"image_size": 32, "patch_size": 8}
    vision = {**SMALL, **image, "mlp_dim": 16, "output_channels": 16, "window_size": 2,
              "global_attn_indexes": [0], "num_pos_feats": 8}  # fmt: skip
    prompt = {**image, "hidden_size": 16, "mask_input_channels": 4}
    decoder = {**SMALL, "mlp_dim": 16, "iou_head_hidden_dim": 16}
    config = SamConfig(
        vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder
    )
    save(SamModel(config), path)
    SamImageProcessorPil(
        size={"longest_edge": 32},
        pad_size={"height": 32, "width": 32},
        mask_size={"longest_edge": 8},
        mask_pad_size={"height": 8, "width": 8},
    ).save_pretrained(path)


def matcher(path: Path) -> None:
    points = SuperPointConfig(encoder_hidden_sizes=[8, 8, 8, 16], decoder_hidden_size=16,
                              descriptor_decoder_dim=16, keypoint_threshold=0.0, max_keypoints=16,
                              border_removal_distance=0)  # fmt: skip
    config = SuperGlueConfig(keypoint_detector_config=points, hidden_size=16,
                             keypoint_encoder_sizes=[8], gnn_layers_types=["self", "cross"],
                             sinkhorn_iterations=5, matching_threshold=0.0,
                             num_attention_heads=2)  # fmt: skip
    save(SuperGlueForKeypointMatching(config), path)
    SuperGlueImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(path)


def watcher(path: Path) -> None:
    config = VideoMAEConfig(**SMALL, image_size=16, patch_size=8, num_frames=NUM_FRAMES,
                            tubelet_size=2, num_labels=3)  # fmt: skip
    save(VideoMAEForVideoClassification(config), path)
    VideoMAEImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    ).save_pretrained(path)


def sound_labeller(path: Path) -> None:
    text = {**BERT, "max_position_embeddings": 34, "projection_dim": 8}
    audio = {"patch_embeds_hidden_size": 8, "hidden_size": 16, "depths": [1, 1],
             "num_attention_heads": [2, 2], "spec_size": 32, "num_mel_bins": 8, "window_size": 4,
             "patch_size": 2, "patch_stride": 2, "projection_dim": 8}  # fmt: skip
    save(ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=8)), path)
    ClapFeatureExtractor(feature_size=8, sampling_rate=8000, hop_length=80, max_length_s=1,
                         fft_window_size=64, frequency_max=4000, truncation="rand_trunc",
                         ).save_pretrained(path)  # fmt: skip
    tokenizer().save_pretrained(path)


def table_reader(path: Path) -> None:
    config = TapasConfig(**SMALL, vocab_size=len(CELLS), max_position_embeddings=64,
                         num_aggregation_labels=2, aggregation_labels={0: "NONE", 1: "SUM"},
                         no_aggregation_label_index=0)  # fmt: skip
    save(TapasForQuestionAnswering(config), path)
    (path / "vocab.txt").write_text("\n".join(CELLS) + "\n")
    TapasTokenizer(str(path / "vocab.txt"), model_max_length=64).save_pretrained(path)


def page_reader(path: Path) -> None:
    save(
        LayoutLMForQuestionAnswering(LayoutLMConfig(**BERT, max_2d_position_embeddings=1024)), path
    )
    tokenizer().save_pretrained(path)


def page_and_picture_reader(path: Path) -> None:
    """A document model whose processor would find the words with Tesseract."""
    letters = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abcdefghijklmnopqrstuvwxyz", "\u0120"]
    config = LayoutLMv3Config(**SMALL | {"hidden_size": 24}, vocab_size=len(letters),
                              max_position_embeddings=64, coordinate_size=4, shape_size=4,
                              input_size=8, patch_size=4, num_labels=2)  # fmt: skip
    save(LayoutLMv3ForQuestionAnswering(config), path)
    LayoutLMv3ImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(path)
    vocabulary = {letter: id for id, letter in enumerate(letters)}
    LayoutLMv3Tokenizer(vocab=vocabulary, merges=[], model_max_length=60).save_pretrained(path)


def picture_reader(path: Path) -> None:
    """A Donut model, which needs no words."""
    words = tokenizer()
    words.eos_token = "[SEP]"
    swin = DonutSwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 1], window_size=2
    )
    bart = MBartConfig(vocab_size=len(words), d_model=16, decoder_layers=1, pad_token_id=0,
                       decoder_attention_heads=2, decoder_ffn_dim=16, is_decoder=True,
                       max_position_embeddings=64, add_cross_attention=True)  # fmt: skip
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(swin, bart)
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    model = VisionEncoderDecoderModel(config=config)
    model.generation_config.max_new_tokens = 8
    save(model, path)
    DonutImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(path)
    words.save_pretrained(path)


def chatter(path: Path, text: Mapping[str, object] = LLAMA) -> None:
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = {**SMALL, "model_type": "clip_vision_model", "num_hidden_layers": 2, "image_size": 8,
              "patch_size": 4, "projection_dim": 8}  # fmt: skip
    text = {**text, "vocab_size": len(words), "max_position_embeddings": 64, "pad_token_id": 0}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=len(words) - 1)
    save(LlavaForConditionalGeneration(config), path)
    images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    LlavaProcessor(images, words, patch_size=4, vision_feature_select_strategy="default",
                   image_token="<image>", num_additional_image_tokens=1,
                   chat_template=CHAT_TEMPLATE).save_pretrained(path)  # fmt: skip


def chatter_with_table(path: Path) -> None:
    """A model whose positions are a table of embeddings."""
    chatter(path, {**SMALL, "model_type": "biogpt"})


def speaker(path: Path) -> None:
    config = VitsConfig(
        vocab_size=len(LETTERS), hidden_size=16, num_hidden_layers=1, window_size=4, ffn_dim=16,
        flow_size=16, spectrogram_bins=9, prior_encoder_num_flows=2,
        prior_encoder_num_wavenet_layers=1, upsample_initial_channel=16, upsample_rates=[8, 8],
        upsample_kernel_sizes=[16, 16], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]],
        posterior_encoder_num_wavenet_layers=1, duration_predictor_num_flows=2,
        duration_predictor_filter_channels=16, use_stochastic_duration_prediction=False,
        noise_scale=0.0, sampling_rate=8000,
    )  # fmt: skip
    VitsModel(config).save_pretrained(path)  # large weights would make it too loud
    letters = {letter: id for id, letter in enumerate(LETTERS)}
    (path / "vocab.json").write_text(json.dumps(letters))
    VitsTokenizer(str(path / "vocab.json"), phonemize=False, is_uroman=False).save_pretrained(path)


def save(model: PreTrainedModel, path: Path) -> None:
    """Save the model with larger weights, so that answers differ."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 1.4 / weight.shape[-1] ** 0.5)
    model.save_pretrained(path)


MEDIA_MODELS: Mapping[str, Callable[[Path], None]] = {
    make.__name__: make
    for make in (segmenter, panoptic_segmenter, depth_estimator, mask_maker, matcher, watcher,
                 sound_labeller, table_reader, page_reader, page_and_picture_reader, picture_reader,
                 chatter, chatter_with_table, speaker)
}  # fmt: skip
