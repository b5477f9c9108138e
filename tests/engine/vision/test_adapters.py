"""LoRA adapters of the language models of models that take images."""

from __future__ import annotations

import shutil

from engine import LLM
from tests.engine.lora.adapter_files import merged, read_files, registry, write_adapter
from tests.engine.vision.conversations import SMALL, answers, prompts


def test_peft_names_layers_by_their_path_in_the_whole_model(vision_model, expected, tmp_path):
    path = vision_model("qwen3_vl")
    folder = write_adapter(path, tmp_path / "adapter", targets=("q_proj", "down_proj"))
    assert all(".language_model." in name for name in read_files(folder)[0])
    whole = merged(path, folder, shutil.copytree(path, tmp_path / path.name))
    given = prompts(path)
    merged_answers = answers(LLM(whole, num_kv_blocks=400, **SMALL), given)
    assert merged_answers != expected("qwen3_vl")
    llm = LLM(path, enable_lora=True, num_kv_blocks=400, **SMALL)
    adapters = registry(llm.llm_engine)
    adapters.load("a", str(folder))
    assert answers(llm, given, parts=adapters.parts("a")) == merged_answers
    assert answers(llm, given) == expected("qwen3_vl")
