"""`option.speculative_config`, vLLM's form of the options."""

from __future__ import annotations

import pytest

from core.configuration.options import SpeculationOptions, make_options
from core.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 3}', ("ngram", 3)),
        ('{"method": "suffix"}', ("suffix", 5)),
        ('{"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}', ("ngram", 5)),
        ('{"num_speculative_tokens": 16}', ("ngram", 16)),
        ('{"model": "small", "num_speculative_tokens": 3}', ("draft_model", 3)),
        ('{"method": "draft_model", "model": "small"}', ("draft_model", 5)),
        ('{"method": "mtp", "num_speculative_tokens": 1}', ("mtp", 1)),
        ('{"method": "qwen3_next_mtp"}', ("mtp", 5)),
        ('{"method": "ernie_mtp"}', ("mtp", 5)),
    ],
)
def test_a_config_of_vllm(text, chosen):
    assert make_options({"speculative_config": text}).speculation.chosen == chosen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ('{"method": "eagle3"}', "eagle3"),
        ('{"modell": "small"}', "unknown field `modell`"),
        ('{"max_model_len": 9}', "its keys may be method, model, num_speculative_tokens, prompt_"),
        ('{"method": "draft_model"}', "the method draft_model and no model; set"),
        ('{"method": "ngram", "model": "small"}', "the method ngram and small model"),
        ('{"method": "mtp", "model": "small"}', "the method mtp and small model"),
        ('{"method": 1}', "$.method"),
        ('{"num_speculative_tokens": 17}', "`int` <= 16 - at `$.num_speculative_tokens`"),
        ('{"num_speculative_tokens": true}', "$.num_speculative_tokens"),
    ],
)
def test_a_config_that_is_wrong_is_an_error(text, message):
    with pytest.raises(ConfigurationError, match="speculative_config") as raised:
        SpeculationOptions(speculative_config=text)
    assert message in str(raised.value)


def test_the_options_of_its_own_names():
    options = SpeculationOptions(speculative_method="suffix", num_speculative_tokens=7)
    assert options.chosen == ("suffix", 7)
    assert options.draft_model is None
    options = SpeculationOptions(speculative_draft_model="small")
    assert (options.chosen, options.draft_model) == (("draft_model", 5), "small")
    options = SpeculationOptions(speculative_draft_model="small", speculation="off")
    assert (options.chosen, options.draft_model) == ((None, 5), None)
    assert SpeculationOptions().chosen == (None, 5)
