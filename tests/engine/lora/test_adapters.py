"""LoRA adapters: greedy fp32 tokens equal those of models with merged weights."""

from __future__ import annotations

import pytest
import torch

from container.capacity.decoder import decoder_from_directory
from container.capacity.estimate import reserved_bytes
from core.configuration.options import Options, make_options
from core.errors import ConfigurationError, ConflictError, NoRoomError, NotFoundError, RequestError
from engine import LLM, LoRARequest, SamplingParams
from engine.lora.adapter_registry import slots_in_use
from kernels.cpu.linear import is_faster
from tests.e2e.serving import DEMO
from tests.engine.greedy_answers import NUM_NEW, STRATEGIES, generate, prompts, tokens
from tests.engine.lora.adapter_files import (
    TARGETS,
    adapted_llm,
    merged,
    read_files,
    registry,
    write_adapter,
    write_files,
)
from tests.engine.step.graphs import add_graphs

KINDS = ("a", "b", None)
"""The prompts use these adapters in turn. None is the base model."""


@pytest.fixture(scope="module")
def adapted(tiny_model, tmp_path_factory):
    """Return a function architecture → (model, adapter folders, greedy answers by name)."""
    known = {}

    def adapted_model(architecture, targets=TARGETS, *, is_wide=False):
        if (architecture, targets, is_wide) not in known:
            folder = tmp_path_factory.mktemp("adapted")
            model = tiny_model(architecture, is_wide=is_wide)
            some = {"a": (3, 1, targets), "b": (5, 2, targets[1:])}
            folders = {
                name: write_adapter(
                    model, folder / "adapters" / name, rank=rank, seed=seed, targets=names
                )
                for name, (rank, seed, names) in some.items()
            }
            answers = {
                name: generate(merged(model, source, folder / "merged" / name))
                for name, source in folders.items()
            }
            answers[None] = generate(model)
            known[architecture, targets, is_wide] = model, folders, answers
        return known[architecture, targets, is_wide]

    return adapted_model


def requests(folders, names):
    return [
        name and LoRARequest(name, 1 + list(folders).index(name), str(folders[name]))
        for name in names
    ]


def greedy(llm, folders, names, **changes):
    """Return the answer to each prompt with its adapter from `names`."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, **changes)
    outputs = llm.generate(prompts(), params, use_tqdm=False, lora_request=requests(folders, names))
    return [output.outputs[0].token_ids for output in outputs]


def each_with(names, answers):
    """Return the expected answer to each prompt with its adapter from `names`."""
    return [answers[name][place] for place, name in enumerate(names)]


def mixtures():
    """Return three batches in which every prompt occurs once with every adapter."""
    return [[KINDS[(place + turn) % 3] for place in range(len(prompts()))] for turn in range(3)]


def test_adapters_matter(adapted):
    """If adapters changed no token, the tests below could not fail."""
    _, _, answers = adapted("llama")
    for one, other in (("a", "b"), ("a", None), ("b", None)):
        pairs = zip(answers[one], answers[other], strict=True)
        assert sum(left != right for left, right in pairs) >= 4


@pytest.mark.matrix
@pytest.mark.parametrize("decoder", ["own", "transformers"])
@pytest.mark.parametrize("batching", STRATEGIES)
def test_a_mixed_batch_equals_single_requests(adapted, batching, decoder):
    check_mixed_batches(*adapted("llama", is_wide=decoder == "own"), batching, decoder)


def check_mixed_batches(model, folders, answers, batching, decoder="own"):
    """Chunks of prompts run beside decodes, and `paged` preempts."""
    llm = adapted_llm(
        model,
        batching=batching,
        decoder=decoder,
        num_kv_blocks=14 if batching == "paged" else 40,
        max_rolling_batch_prefill_tokens=10,
        **STRATEGIES[batching],
    )
    assert llm.facts.decoder.startswith(decoder)
    for names in mixtures():
        assert greedy(llm, folders, names) == each_with(names, answers)
    if batching == "paged":
        assert llm.llm_engine.strategy.num_preemptions > 0


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("phi3", ("qkv_proj", "gate_up_proj", "down_proj")),
        ("gpt2", ("c_attn", "c_proj", "c_fc")),
        ("qwen2", ("q_proj", "v_proj")),
        ("mixtral", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("qwen2_moe", ("q_proj", "gate_proj", "up_proj", "down_proj")),
        ("ernie4_5", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("gpt_neox", ("query_key_value", "dense", "dense_h_to_4h")),
        ("biogpt", ("q_proj", "k_proj", "v_proj", "fc1")),
    ],
)
def test_other_layer_layouts(adapted, architecture, targets):
    """The models have fused q, k and v, transposed weights, biases, experts or permuted rows.

    Some run with transformers' code.
    """
    model, folders, answers = adapted(architecture, targets, is_wide=True)
    llm = adapted_llm(model)
    for names in mixtures()[:2]:
        assert greedy(llm, folders, names) == each_with(names, answers)


DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj")


@pytest.mark.matrix(cases=6)
@pytest.mark.parametrize("batching", ["continuous", "paged"])
@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("lfm2", ("in_proj", "out_proj", "q_proj", "w1", "w2")),
        ("qwen3_5_text", DELTA_NET),
        ("qwen3_next", ("q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj")),
        ("granitemoehybrid", ("in_proj", "out_proj", "q_proj", "input_linear", "output_linear")),
        ("falcon_h1", ("in_proj", "out_proj", "k_proj", "gate_proj", "down_proj")),
        ("nemotron_h", ("in_proj", "v_proj", "up_proj", "fc1_latent_proj", "fc2_latent_proj")),
        ("mamba2", ("in_proj", "out_proj")),
        ("falcon_mamba", ("in_proj", "x_proj", "dt_proj", "out_proj")),
    ],
)
def test_layers_with_a_state(adapted, architecture, targets, batching):
    model, folders, answers = adapted(architecture, targets, is_wide=True)
    assert answers["a"] != answers["b"] != answers[None] != answers["a"]
    check_mixed_batches(model, folders, answers, batching)


@pytest.mark.parametrize("overlaps", [False, True])
def test_adapters_with_cuda_graphs(adapted, overlaps):
    """Steps with and without adapters have separate graphs."""
    model, folders, answers = adapted("llama")
    llm = adapted_llm(
        model,
        num_kv_blocks=14,
        max_rolling_batch_prefill_tokens=10,
        async_scheduling=overlaps,
    )
    recorder = add_graphs(llm, prompt_sizes=(10,))
    assert recorder.num_recorded == 2 * 5
    for names in [*mixtures(), [None] * len(prompts())]:
        num_replays, num_steps = recorder.num_replays, llm.llm_engine.num_steps
        assert greedy(llm, folders, names) == each_with(names, answers)
        num_steps = llm.llm_engine.num_steps - num_steps
        assert recorder.num_replays - num_replays > 0.9 * num_steps, "prompts use graphs, too"
    assert llm.llm_engine.strategy.num_preemptions > 0


def test_steps_without_adapters_add_nothing(adapted, monkeypatch):
    model, folders, answers = adapted("llama")
    llm = adapted_llm(model)
    assert greedy(llm, folders, mixtures()[0]) == each_with(mixtures()[0], answers)
    monkeypatch.setattr("engine.lora.memory._Factors.add", None)
    assert tokens(llm) == answers[None]


@pytest.mark.parametrize(
    ("architecture", "targets"), [("llama", TARGETS), ("qwen3_5_text", DELTA_NET)]
)
def test_the_prefix_cache_distinguishes_adapters(adapted, architecture, targets):
    """Two adapters that have the same name and slot one after the other are distinguished, too."""
    model, folders, answers = adapted(architecture, targets)
    llm = adapted_llm(model, max_loras=1)
    adapters, strategy = registry(llm.llm_engine), llm.llm_engine.strategy
    prompt, params = prompts()[3], SamplingParams(temperature=0, max_tokens=NUM_NEW)

    def answer(adapter):
        """Return the tokens, and whether the prompt's prefix was cached."""
        before = strategy.num_prefix_hits
        id, answered = llm.llm_engine.add(prompt, params, 0.0, adapters.parts(adapter)), []
        while llm.llm_engine.has_work():
            answered += [t for output in llm.llm_engine.step(0.0) for t in output.token_ids]
            assert id is not None
        return answered, strategy.num_prefix_hits > before

    for name in ("a", "b"):
        adapters.load("same", str(folders[name]))
        assert answer("same") == (answers[name][3], False)
        assert answer("same") == (answers[name][3], True)
        assert answer("") == (answers[None][3], name == "b")
        adapters.unload("same")


def test_an_unloaded_adapter_still_serves_running_requests(adapted):
    model, folders, answers = adapted("llama")
    llm = adapted_llm(model, max_loras=1)
    engine, adapters = llm.llm_engine, registry(llm.llm_engine)
    adapters.load("one", str(folders["a"]))
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW)
    id = engine.add(prompts()[1], params, 0.0, adapters.parts("one"))
    answered = [output.token_ids for output in engine.step(0.0)]
    adapters.unload("one")
    with pytest.raises(
        NotFoundError, match="no adapter 'one' is loaded; the loaded adapters: none"
    ):
        engine.add(prompts()[1], params, 0.0, adapters.parts("one"))
    with pytest.raises(NoRoomError, match="1 are unloaded but still in use"):
        adapters.load("two", str(folders["b"]), slots_in_use(engine.parts_in_use()))
    while engine.has_work():
        answered += [output.token_ids for output in engine.step(0.0) if output.request_id == id]
    assert [token for ids in answered for token in ids] == answers["a"][1]
    adapters.load("two", str(folders["b"]), slots_in_use(engine.parts_in_use()))
    assert [loaded.name for loaded in adapters.loaded] == ["two"]


def test_several_answers_and_beams_use_the_adapter(adapted, tmp_path):
    model, folders, _ = adapted("llama")
    whole = LLM(merged(model, folders["a"], tmp_path), dtype="fp32", block_size=4)
    llm = adapted_llm(model)
    for params in (
        SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=8),
        SamplingParams(num_beams=3, max_tokens=8),
    ):
        expected = whole.generate(prompts(), params, use_tqdm=False)
        found = llm.generate(
            prompts(), params, use_tqdm=False, lora_request=LoRARequest("a", 1, folders["a"])
        )
        for left, right in zip(found, expected, strict=True):
            pairs = zip(left.outputs, right.outputs, strict=True)
            assert all(one.token_ids == other.token_ids for one, other in pairs)


def test_rslora_scales_by_the_square_root_of_the_rank(tiny_model, tmp_path):
    model = tiny_model("llama")
    folder = write_adapter(model, tmp_path / "a", rank=4, alpha=3, use_rslora=True)
    llm = adapted_llm(model)
    names = ["a"] * len(prompts())
    assert greedy(llm, {"a": folder}, names) == generate(merged(model, folder, tmp_path / "m"))


def test_layers_may_have_different_ranks(tiny_model, tmp_path):
    """Each layer is scaled by its own rank, as in PEFT with a rank_pattern."""
    model, ranks = tiny_model("llama"), {"q_proj": 2, "v_proj": 5}
    one_each = [
        write_adapter(model, tmp_path / name, rank=rank, targets=(name,), alpha=3)
        for name, rank in ranks.items()
    ]
    both = {key: weight for folder in one_each for key, weight in read_files(folder)[0].items()}
    folder = write_files(tmp_path / "both", both, r=2, lora_alpha=3, rank_pattern={"v_proj": 5})
    by_turns = merged(merged(model, one_each[0], tmp_path / "m"), one_each[1], tmp_path / "m2")
    llm = adapted_llm(model)
    assert greedy(llm, {"a": folder}, ["a"] * len(prompts())) == generate(by_turns)


def test_in_bf16_the_logprobs_are_near_those_in_fp32(adapted):
    """A logit bias forces the same tokens in both, and does not affect logprobs."""
    model, folders, _ = adapted("llama", is_wide=True)
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logit_bias={7: 1e5}, logprobs=0
    )

    def logprobs(dtype, names):
        llm = adapted_llm(model, dtype=dtype)
        wanted = requests(folders, names)
        outputs = llm.generate(prompts(), params, use_tqdm=False, lora_request=wanted)
        return torch.tensor(
            [[place[7].logprob for place in output.outputs[0].logprobs] for output in outputs]
        )

    names = mixtures()[0]
    exact, low = logprobs("fp32", names), logprobs("bf16", names)
    without = logprobs("fp32", [None] * len(names))
    torch.testing.assert_close(low, exact, atol=0.25, rtol=0)
    assert (exact - without).abs().max() > 1


def test_the_plan_counts_what_the_engine_reserves():
    options = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "dtype": "fp32"}
    decoder = decoder_from_directory(DEMO, make_options(options))
    model = LLM(DEMO, **options).llm_engine.executor.passes.model
    [reserved] = reserved_bytes(decoder, make_options(options)).values()
    num_copies = 2 if is_faster() else 1  # CPUs' panels; a plan is for GPUs
    assert reserved * num_copies == model.columns[0].memory.num_bytes > 0
    assert reserved_bytes(decoder, Options()) == {}


def test_a_reused_slot_keeps_nothing(adapted, tmp_path):
    """The next adapter has a lower rank and fewer layers."""
    model, folders, _ = adapted("llama")
    small = write_adapter(model, tmp_path / "s", rank=1, targets=("v_proj",), seed=9)
    llm = adapted_llm(model, max_loras=1)
    greedy(llm, folders, ["a"] * len(prompts()))
    names = ["s"] * len(prompts())
    assert greedy(llm, {"s": small}, names) == generate(merged(model, small, tmp_path / "m"))


def test_offline_adapters_are_evicted_for_others(adapted):
    """There is one slot, and batches use different adapters in turn, as in vLLM's examples."""
    model, folders, answers = adapted("llama")
    llm = adapted_llm(model, max_loras=1)
    for name in ("a", "b", "a"):
        names = [name] * len(prompts())
        assert greedy(llm, folders, names) == each_with(names, answers)
    with pytest.raises(RequestError, match="2 adapters in one call are more than max_loras=1"):
        greedy(llm, folders, mixtures()[0])
    with pytest.raises(RequestError, match="2 given for 1 prompts"):
        llm.generate([[1, 2]], lora_request=requests(folders, ("a", "b")))
    with pytest.raises(RequestError, match="enable_lora=True"):
        greedy(LLM(model, dtype="fp32"), folders, mixtures()[0])


def test_adapters_next_to_the_model_are_loaded_at_start(adapted, tmp_path):
    model, folders, answers = adapted("llama")
    llm = adapted_llm(model, adapters=str(folders["a"].parent), max_loras=2)
    adapters = registry(llm.llm_engine)
    assert [loaded.name for loaded in adapters.loaded] == ["a", "b"]
    assert any(note.endswith("loaded: a, b") for note in llm.facts.notes)
    params = SamplingParams(temperature=0, max_tokens=1)
    id = llm.llm_engine.add(prompts()[0], params, 0.0, adapters.parts("b"))
    assert llm.llm_engine.step(0.0)[0].token_ids == (answers["b"][0][0],)
    assert id == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"adapters": "/nowhere"}, "option.adapters=/nowhere: no such directory"),
        ({"executor": "library", "batching": "none"}, "needs the packed executor, but option.exec"),
        ({"enable_lora": False, "adapters": "x"}, "needs option.enable_lora=true"),
        ({"max_loras": 1}, "option.max_loras is 1"),
        ({"max_lora_rank": 4}, "rank 5, but option.max_lora_rank is 4; raise it"),
    ],
)
def test_errors_at_start(adapted, options, reason):
    model, folders, _ = adapted("llama")
    with pytest.raises(ConfigurationError) as caught:
        LLM(model, **{"enable_lora": True, "adapters": str(folders["a"].parent)} | options)
    assert reason in str(caught.value)


def test_overflow_in_one_adapter_does_not_affect_another(adapted):
    model, folders, answers = adapted("llama")
    llm = adapted_llm(model)
    assert greedy(llm, folders, mixtures()[0]) == each_with(mixtures()[0], answers)
    memory = llm.llm_engine.executor.passes.model.columns[0].memory
    slots = {loaded.name[0]: loaded.slot for loaded in registry(llm.llm_engine).loaded}
    with torch.inference_mode():
        for factors in memory.factors:
            down = factors.down.view(len(factors.up), memory.num_slots, memory.max_rank, -1)
            down[:, slots["b"]] = 1e38  # infinite for most inputs
    names = ["a" if name == "b" else name for name in mixtures()[0]]
    assert greedy(llm, folders, names, cache_salt="new") == each_with(names, answers)


def test_names_and_slots(adapted):
    model, folders, _ = adapted("llama")
    adapters = registry(adapted_llm(model, max_loras=2).llm_engine)
    first = adapters.load("a", str(folders["a"]))
    assert (first.rank, first.src) == (3, str(folders["a"]))
    with pytest.raises(ConflictError, match="'a' is loaded already; unload it first"):
        adapters.load("a", str(folders["b"]))
    adapters.reserve("b")
    with pytest.raises(ConflictError, match="'b' is being loaded"):
        adapters.reserve("b")
    with pytest.raises(NoRoomError, match=r"option\.max_loras is 2; unload an adapter"):
        adapters.reserve("c")
    adapters.cancel("b")
    second = adapters.load("b", str(folders["b"]))
    assert first.slot != second.slot
    with pytest.raises(NotFoundError, match="no adapter 'c' is loaded; the loaded adapters: a, b"):
        adapters.unload("c")
    adapters.unload("a")
    again = adapters.load("a", str(folders["a"]))
    assert again.slot == first.slot
    assert again != first
