"""Models whose layers keep a state: slots, their sharing, swaps, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from core.errors import ConfigurationError, RequestError
from engine import LLM, SamplingParams
from engine.loading.open_model import read_config
from engine.model.published.settings import read_spec
from strategies.memory.states import StateMemory
from tests.engine.greedy_answers import NUM_NEW, prompts, tokens

OPTIONS = {"dtype": "fp32", "block_size": 4, "max_rolling_batch_prefill_tokens": 10}
MODELS = ["lfm2", "qwen3_5_text", "falcon_h1"]


def poison(llm):
    """Let all slots that have no state to keep be NaN before each step."""
    engine = llm.llm_engine
    memory, step = engine.strategy.memory, engine.step
    assert isinstance(memory, StateMemory)

    def poisoned_step(*arguments):
        slots = memory.states.slots
        known = {*slots.held.values()}
        for chunk in engine.in_flight[0].chunks if engine.in_flight else ():
            known |= {*chunk.state.written, *(slot for _, slot in chunk.state.kept)}
        free = [n for n in range(slots.count) if n not in known and n not in slots.checkpoints]
        engine.executor.passes.cache.states.rows[free] = 255  # NaN in any float
        return step(*arguments)

    engine.step = poisoned_step


@pytest.mark.parametrize("architecture", MODELS)
def test_swapped_states_and_freed_ones_full_of_nan(tiny_model, expected, architecture):
    """All slots that no sequence holds are NaN before each step."""
    llm = LLM(
        tiny_model(architecture), batching="paged", num_kv_blocks=12, preemption_mode="swap",
        **OPTIONS,
    )  # fmt: skip
    poison(llm)
    engine = llm.llm_engine
    assert tokens(llm, ignore_eos=True) == expected(architecture, eos_token_id=None)
    assert engine.strategy.num_swaps > 0
    assert not engine.strategy.memory.states.slots.held


@pytest.mark.matrix(cases=2)
@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_5_text", "bamba"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_next_turns_begin_with_the_states_of_earlier_ones(
    tiny_model, expected, architecture, mode, overlaps
):
    """The greedy answer to a prompt and the start of its answer is the rest of the answer."""
    llm = LLM(
        tiny_model(architecture), num_kv_blocks=16, preemption_mode=mode,
        max_rolling_batch_size=3, async_scheduling=overlaps, **OPTIONS,
    )  # fmt: skip
    poison(llm)
    whole = expected(architecture, eos_token_id=None)
    for pair in itertools.pairwise(zip(prompts(), whole, strict=True)):
        for start, end in itertools.pairwise((0, 5, 9, NUM_NEW)):
            turns = [prompt + answer[:start] for prompt, answer in pair]
            for n in (1, 2):
                params = SamplingParams(n=n, temperature=0, max_tokens=end - start, ignore_eos=True)
                outputs = llm.generate(turns, params, use_tqdm=False)
                for output, (_, answer) in zip(outputs, pair, strict=True):
                    assert [one.token_ids for one in output.outputs] == [answer[start:end]] * n
    strategy = llm.llm_engine.strategy
    assert strategy.num_prefix_hits > strategy.num_prefix_queries / 3
    assert strategy.num_preemptions > 0
    assert (strategy.num_swaps > 0) == (mode == "swap")


@pytest.mark.parametrize("architecture", ["falcon_h1", "granitemoehybrid"])
def test_answers_are_no_prompts_where_only_those_are_clamped(tiny_model, architecture):
    def conversation(**changes):
        llm = LLM(tiny_model(architecture), num_kv_blocks=40, **OPTIONS, **changes)
        tokens = prompts()[1]
        for _ in range(3):
            params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
            [output] = llm.generate([tokens], params, use_tqdm=False)
            tokens = [*tokens, *output.outputs[0].token_ids, 5]
        return tokens, llm.llm_engine.strategy.num_prefix_hits

    plain, _ = conversation(enable_prefix_caching=False)
    cached, num_hits = conversation()
    assert cached == plain
    assert num_hits == 16 + 24, "the prompts of the turns before, in whole blocks"


@pytest.mark.parametrize("architecture", MODELS)
def test_samples_fork_after_their_prompt(tiny_model, expected, architecture):
    llm = LLM(
        tiny_model(architecture), num_kv_blocks=40, max_rolling_batch_size=8, **OPTIONS
    )  # fmt: skip
    params = SamplingParams(n=3, temperature=0, max_tokens=NUM_NEW)
    answers = llm.generate(prompts(), params, use_tqdm=False)
    for answer, tokens_of_one in zip(answers, expected(architecture), strict=True):
        assert [output.token_ids for output in answer.outputs] == [tokens_of_one] * 3
    num_prompt_tokens = sum(map(len, prompts()))
    num_new = sum(len(output.token_ids) for answer in answers for output in answer.outputs)
    assert llm.llm_engine.num_step_tokens < 2 * num_prompt_tokens + num_new


def test_scored_prompts_run_in_parts(tiny_model, monkeypatch):
    """Each part of a chunk reads the state that the part before it has left."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)

    def scores():
        llm = LLM(tiny_model("lfm2"), num_kv_blocks=40, **OPTIONS)
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        return [[next(iter(p.values())).logprob for p in o.prompt_logprobs[1:]] for o in outputs]

    whole = scores()
    monkeypatch.setattr("engine.scores.column.MAX_SCORED_ROWS", 3)
    assert [pytest.approx(row, abs=1e-4) for row in scores()] == whole


@pytest.mark.parametrize("architecture", MODELS)
def test_bits_do_not_depend_on_chunks(tiny_model, architecture):
    def logprobs(step_tokens):
        options = OPTIONS | {"max_rolling_batch_prefill_tokens": step_tokens}
        llm = LLM(tiny_model(architecture, is_wide=True), num_kv_blocks=40, **options)
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        return [[next(iter(p.values())).logprob for p in o.outputs[0].logprobs] for o in outputs]

    assert logprobs(100) == logprobs(7)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("falcon_h1", {"mamba_norm_before_gate": False}),
        ("falcon_h1", {"mamba_norm_before_gate": True, "mamba_rms_norm": False}),
        ("nemotron_h", {"moe_latent_size": None}),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention"]}),
    ],
)
def test_other_forms(tiny_model, architecture, changes):
    """The gate compares their logits with transformers'."""
    path = tiny_model(architecture, changes=changes)
    llm = LLM(path, num_kv_blocks=20, decoder="own", **OPTIONS)
    assert llm.facts.decoder == f"own ({architecture})"


@pytest.mark.parametrize(
    "architecture", ["lfm2", "qwen3_5_text", "qwen3_next", "nemotron_h", "mamba", "falcon_mamba"]
)
def test_quantized(tiny_model, architecture):
    def answers(step_tokens):
        options = OPTIONS | {"max_rolling_batch_prefill_tokens": step_tokens}
        path = tiny_model(architecture, is_wide=True)
        llm = LLM(path, quantize="int8", num_kv_blocks=40, **options)
        assert llm.facts.decoder == f"own ({architecture})"
        return tokens(llm)

    assert answers(100) == answers(7)


def test_narrow_sums_take_half_the_memory(tiny_model):
    def run(**changes):
        path = tiny_model("qwen3_5_text", is_wide=True)
        llm = LLM(path, num_kv_blocks=40, **OPTIONS, **changes)
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0)
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [NUM_NEW] * len(prompts())
        first = [next(iter(o.outputs[0].logprobs[1].values())).logprob for o in outputs]
        sums = [
            matrices[0].nbytes for _, matrices in llm.llm_engine.executor.passes.cache.states.layers
        ]
        return first, sum(sums), llm.facts.notes

    wide, num_bytes, notes = run()
    narrow, num_narrow, notes_of_narrow = run(state_dtype="bf16")
    assert num_narrow == num_bytes // 2
    assert narrow != wide
    assert narrow == pytest.approx(wide, abs=0.1)
    assert [note for note in notes_of_narrow if "option.state_dtype rounds states" in note]
    assert not [note for note in notes if "rounds states" in note]


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("lfm2", {}, "lfm2 is not among our own decoders .* leave it out"),
        ("llama", {}, "llama is not among our own decoders .* leave it out"),
        ("qwen3_5_text", {"executor": "library"}, "needs the packed executor, .* leave it out"),
        (
            "qwen3_5_text",
            {"batch_invariant": True},
            "option.batch_invariant=true: .* rounds states",
        ),
        ("qwen3_5_text", {"state_dtype": "fp16"}, "expected one of fp32, bf16"),
    ],
)
def test_other_types_of_states_are_refused(tiny_model, architecture, changes, reason):
    options = {"state_dtype": "bf16", "num_kv_blocks": 40, **OPTIONS} | changes
    with pytest.raises(ConfigurationError, match=reason):
        LLM(tiny_model(architecture, is_wide=True), **options)


def test_the_start_says_what_a_sequence_keeps(tiny_model):
    llm = LLM(tiny_model("lfm2"), num_kv_blocks=40, max_rolling_batch_size=4, **OPTIONS)
    assert llm.facts.max_sequences == 4
    [note] = (note for note in llm.facts.notes if "state" in note)
    # two layers with two inputs of 32 channels
    assert note == (
        "each sequence keeps a state of 0.5 KiB: 3.0 KiB for 4 (or a search 4 wide); 2.0 KiB more "
        "for 4 checkpoints of cached prefixes"
    )


@pytest.mark.parametrize("changes", [{"enable_prefix_caching": False}, {"batching": "dynamic"}])
def test_no_checkpoints_without_a_prefix_cache(tiny_model, changes):
    llm = LLM(tiny_model("lfm2"), num_kv_blocks=40, **OPTIONS, **changes)
    assert any(note.endswith("prefixes are not cached") for note in llm.facts.notes)
    assert llm.llm_engine.settings.num_checkpoints == 0


def test_states_take_at_most_half_of_the_memory(tiny_model):
    llm = LLM(
        tiny_model("lfm2"), kv_cache_memory_bytes=40 * 2**10, dtype="fp32", max_model_len=16,
        max_rolling_batch_size=100,
    )  # fmt: skip
    assert llm.facts.max_sequences == 40
    assert llm.facts.num_kv_blocks * llm.facts.block_size * 2 * 2 * 8 * 4 <= 20 * 2**10
    assert any("batches lowered from 100 to 40" in note for note in llm.facts.notes)
    assert llm.llm_engine.settings.num_checkpoints == 0, "sequences come first"


def test_models_of_states_alone_have_nearly_all_of_the_memory_for_them(tiny_model):
    """Each token takes 128 bytes that nobody reads, so that it is counted in blocks."""
    num_bytes = 2**20
    llm = LLM(
        tiny_model("mamba2"), kv_cache_memory_bytes=num_bytes, state_checkpoints=0, dtype="fp32",
        max_model_len=16, max_rolling_batch_size=100,
    )  # fmt: skip
    row = llm.llm_engine.executor.passes.cache.states.rows
    kv_bytes = llm.facts.num_kv_blocks * 16 * 128
    assert row.nbytes > 0.8 * num_bytes
    assert num_bytes - row.shape[1] < row.nbytes + kv_bytes <= num_bytes
    assert llm.facts.num_kv_blocks >= llm.facts.max_sequences == len(row)


def test_checkpoints_share_the_half_of_the_memory_that_states_may_take(tiny_model):
    def llm(**changes):
        return LLM(
            tiny_model("lfm2"), kv_cache_memory_bytes=40 * 2**10, dtype="fp32", max_model_len=64,
            max_rolling_batch_size=10, **changes,
        )  # fmt: skip

    few, many = llm(state_checkpoints=2), llm(state_checkpoints=1000)
    assert few.llm_engine.settings.num_checkpoints == 2
    assert many.llm_engine.settings.num_checkpoints == 30, "20 KiB are 40 states"
    blocks = [one.facts.num_kv_blocks for one in (few, many)]
    assert blocks[0] > blocks[1] > 0


def test_checkpoints_without_room_are_found_on_the_host(tiny_model, expected):
    """92 KiB have room for seven states of 6.3 KiB, six of them for running sequences."""

    def hits(num_checkpoints):
        llm = LLM(
            tiny_model("qwen3_5_text"), kv_cache_memory_bytes=92 * 2**10, max_rolling_batch_size=2,
            state_checkpoints=num_checkpoints, **OPTIONS,
        )  # fmt: skip
        poison(llm)
        whole = expected("qwen3_5_text", eos_token_id=None)
        for start, end in itertools.pairwise((0, 4, 8, NUM_NEW)):
            for prompt, answer in zip(prompts(), whole, strict=True):
                params = SamplingParams(temperature=0, max_tokens=end - start, ignore_eos=True)
                [output] = llm.generate([prompt + answer[:start]], params, use_tqdm=False)
                assert output.outputs[0].token_ids == answer[start:end]
        return llm, llm.llm_engine.strategy.num_prefix_hits

    (few, few_hits), (many, many_hits) = hits(1), hits(30)
    counts = [
        (llm.llm_engine.settings.num_checkpoints, llm.llm_engine.settings.num_host_checkpoints)
        for llm in (few, many)
    ]
    assert counts == [(1, 0), (1, 29)]
    of_both = "6.2 KiB more for 1 and 181.2 KiB of host memory for 29 checkpoints of cached"
    assert any(of_both in note for note in many.facts.notes)
    assert few_hits == 0 < many_hits


def test_there_is_always_room_for_four_beams(tiny_model):
    llm = LLM(tiny_model("lfm2"), num_kv_blocks=40, batching="none", **OPTIONS)
    params = {"max_tokens": 3, "temperature": 0}
    llm.generate([[1, 2]], SamplingParams(num_beams=4, **params), use_tqdm=False)
    with pytest.raises(RequestError, match=r"5 beams .* the room for states .* fewer beams"):
        llm.generate([[1, 2]], SamplingParams(num_beams=5, **params), use_tqdm=False)


def test_speculation_needs_memory_for_two_states(tiny_model):
    with pytest.raises(ConfigurationError, match="no memory for a second state"):
        LLM(tiny_model("lfm2"), kv_cache_memory_bytes=2000, dtype="fp32", max_model_len=4,
            block_size=4, speculative_method="ngram")  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "parts"),
    [
        ("lfm2", "32 channels of convolutions"),
        ("qwen3_next", "2 key heads of delta nets"),
        ("bamba", "2 groups of Mamba heads"),
    ],
)
def test_ranks_that_cannot_have_equal_parts_are_refused(tiny_model, architecture, parts):
    config = read_config(tiny_model(architecture), False)
    with pytest.raises(ConfigurationError, match=f"cannot divide the model's {parts} equally"):
        read_spec(config, 64, num_parts=3)
