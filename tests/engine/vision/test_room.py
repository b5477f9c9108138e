"""What images take of a step's tokens, and of the memory."""

from __future__ import annotations

import torch

from engine import LLM
from engine.memory.capacity import activation_bytes, input_attention_bytes
from tests.engine.vision.conversations import SMALL


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


def test_steps_leave_memory_for_the_encoder(vision_model):
    model = LLM(vision_model(), num_kv_blocks=400, **SMALL).llm_engine.executor.passes.model
    shapes = []

    def measure(work, device):
        shapes.append(work().shape)
        return 100 * len(shapes)

    total = activation_bytes(model, 20, 7, lambda call, num_sequences: 0, None, measure)
    assert shapes == [(7,), (4, 32)], "a token for each sequence, embeddings of a tile"
    assert total == 200 + model.encoder.max_kept_bytes
