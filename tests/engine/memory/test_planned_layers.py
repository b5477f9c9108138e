"""`longshore plan` knows of each family, from config.json alone, what the engine's layers keep."""

from __future__ import annotations

import json

import pytest
from transformers import CONFIG_MAPPING

from container.capacity.architecture import LATENT_TYPES, has_experts, text_settings
from container.capacity.decoder import decoder_from_directory
from core.configuration.options import Options
from engine.loading.open_model import SAME_CONFIG
from engine.model.families import FAMILIES
from engine.model.published.settings import read_spec
from tests.engine.tiny_models import OWN


@pytest.mark.parametrize("is_saved", [False, True], ids=["published", "saved"])
def test_the_plan_counts_what_layers_keep(tmp_path, is_saved):
    """Published configs lack what is the default of the family, such as the kinds of layers."""
    for architecture, given in OWN.items():
        # Qwen 2 MoE alternates, but no published one has windows.
        settings = given | ({"use_sliding_window": False} if architecture == "qwen2_moe" else {})
        config = CONFIG_MAPPING[architecture](**settings)
        written = config.to_dict() if is_saved else {"model_type": architecture, **settings}
        (tmp_path / "config.json").write_text(json.dumps(written))
        planned = decoder_from_directory(tmp_path, Options())
        spec = read_spec(config, max_length=128)
        assert list(planned.shapes) == spec.shapes, architecture
        assert list(planned.states) == spec.states, architecture
        text = text_settings(written)
        experts = [has_experts(text, index) for index in range(len(spec.layers))]
        assert experts == [layer.has_experts for layer in spec.layers], architecture


def test_the_plan_knows_all_families_with_latents():
    families = {name for name, family in FAMILIES.items() if family.has_latents}
    same = {name for name, family in SAME_CONFIG.items() if family in families}
    assert families | same == LATENT_TYPES
