"""The `LLM` class as vLLM's scripts use it, and its own features: streams, chats, close."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from pathlib import Path

import pytest
from tqdm import TMonitor

from core.configuration.options import option_table, owners
from core.errors import ConfigurationError, EngineUnavailableError, GenerationError, RequestError
from engine import LLM, SamplingParams
from engine.offline.llm import RECORDS
from tests.engine.offline.test_llm import GREEDY, letters

ROOT = Path(__file__).parents[3]
TEMPLATE = (
    "{% for each in messages %}{{ each.role[0] }}{{ each.content }}{% endfor %}"
    "{{ mood }}{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def model_dir(tiny_model, tmp_path_factory):
    """The tiny model with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("offline")
    for file in tiny_model("llama").iterdir():
        (path / file.name).symlink_to(file)
    letters().save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def llm(model_dir):
    with LLM(model_dir, dtype="fp32", num_kv_blocks=60, block_size=4) as llm:
        yield llm


def idle(llm):
    return not llm.llm_engine.has_work() and llm.llm_engine.strategy.memory.num_held_blocks == 0


def test_vllms_quick_start(model_dir):
    """The quick start of vLLM's documentation, except for the import and the model."""
    prompts = ["Hello, my name is", "The future of AI is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=str(model_dir), tensor_parallel_size=1, max_num_seqs=4, dtype="float32")
    outputs = llm.generate(prompts, sampling_params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == letters().encode(prompt).ids
        assert output.finished
        answer = output.outputs[0]
        assert len(answer.text) == len(answer.token_ids)
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] == 0 else "length")
        assert len(answer.token_ids) == 16 or answer.finish_reason == "stop"
    assert len({output.request_id for output in outputs}) == 2
    assert llm.options.strategy.max_rolling_batch_size == 4


def test_forms_of_prompts(llm):
    ids = letters().encode("ROMEO:").ids
    forms = ["ROMEO:", ids, {"prompt": "ROMEO:"}, {"prompt_token_ids": ids},
             {"prompt_token_ids": ids, "prompt": "said otherwise"}]  # fmt: skip
    together = llm.generate(forms, GREEDY, use_tqdm=False)
    assert {tuple(output.outputs[0].token_ids) for output in together} == {
        tuple(llm.generate("ROMEO:", GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    }
    assert [output.prompt for output in together] == [
        "ROMEO:", None, "ROMEO:", None, "said otherwise",
    ]  # fmt: skip
    for wrong in ({}, {"text": "x"}, {"prompt": "x", "multi_modal_data": 1}):
        with pytest.raises(RequestError, match="keys of a dict are prompt and prompt_token_ids"):
            llm.generate(wrong, GREEDY, use_tqdm=False)


def test_the_progress_bar_counts_answers(llm, capsys):
    llm.generate(["a", "b"], SamplingParams(max_tokens=2, n=2))
    assert "4/4" in capsys.readouterr().err
    llm.generate(["a"], SamplingParams(max_tokens=2), use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("best_of", [None, 4])
def test_stream_yields_the_answers_in_pieces(llm, best_of):
    """With `best_of` everything comes at the end, because the best answers are only known then."""
    params = [
        SamplingParams(seed=3, n=2, best_of=best_of, max_tokens=9, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    ]
    whole = llm.generate(["x", "yy"], params, use_tqdm=False)
    deltas = list(llm.stream(["x", "yy"], params))
    for number, request in enumerate(whole):
        for output in request.outputs:
            own = [d for d in deltas if (d.prompt_index, d.index) == (number, output.index)]
            assert "".join(delta.text for delta in own) == output.text
            assert [id for delta in own for id in delta.token_ids] == output.token_ids
            reasons = [delta.finish_reason for delta in own]
            assert reasons == [None] * (len(own) - 1) + [output.finish_reason]
            logprobs = [named for delta in own for named in delta.logprobs or ()]
            assert logprobs == (output.logprobs or [])
            is_ranked = best_of is not None and number == 0
            assert (len(own) == 1) == is_ranked
    assert idle(llm)


def test_a_stop_string_ends_one_of_several_answers(llm):
    params = SamplingParams(seed=3, n=3, max_tokens=12, ignore_eos=True)
    texts = [output.text for output in llm.generate("x", params, use_tqdm=False)[0].outputs]
    stop = texts[1][4:6]
    assert stop not in texts[0] + texts[2]
    stopped = SamplingParams(seed=3, n=3, max_tokens=12, ignore_eos=True, stop=stop)
    outputs = llm.generate("x", stopped, use_tqdm=False)[0].outputs
    assert [output.text for output in outputs] == [
        texts[0],
        texts[1][: texts[1].index(stop)],
        texts[2],
    ]
    assert [output.finish_reason for output in outputs] == ["length", "stop", "length"]
    ended = set()
    for new in llm.stream("x", stopped):
        ended |= {new.index} if new.finish_reason else set()
        if ended == {1}:
            assert llm.llm_engine.strategy.num_running == 2, "the ended answer is not continued"
    assert ended == {0, 1, 2}
    assert idle(llm)


def test_best_of_ranks_answers_cut_at_the_stop_string(llm):
    params = {"seed": 3, "max_tokens": 12, "ignore_eos": True}
    sampled = llm.generate("x", SamplingParams(n=4, **params), use_tqdm=False)[0].outputs
    worst = min(sampled, key=lambda output: output.cumulative_logprob)
    stop = worst.text[1:3]
    (best,) = llm.generate("x", SamplingParams(best_of=4, stop=stop, **params), use_tqdm=False)[
        0
    ].outputs
    assert best.text == worst.text[:1]


def test_streams_can_be_interleaved(llm):
    alone = [delta.text for delta in llm.stream("x", GREEDY)]
    pairs = list(zip(llm.stream("x", GREEDY), llm.stream("x", GREEDY), strict=True))
    assert [[one.text for one in pair] for pair in pairs] == [[text] * 2 for text in alone]
    stream = llm.stream("x", GREEDY)
    begun = next(stream).text
    whole = llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].text
    assert begun + "".join(delta.text for delta in stream) == whole


def test_an_abandoned_stream_is_aborted(llm):
    for _ in llm.stream(["x", "y"], GREEDY):
        assert not idle(llm)
        break
    gc.collect()
    assert idle(llm)


def test_a_failure_is_raised_to_the_requests_caller(llm, monkeypatch):
    stream = llm.stream("x", GREEDY)
    next(stream)

    def fail(plan, between_tokens):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.executor, "submit", fail)
        with pytest.raises(GenerationError, match="out of luck"):
            llm.generate("y", GREEDY, use_tqdm=False)
    with pytest.raises(GenerationError, match="out of luck"):
        next(stream)
    assert idle(llm)


def test_chat_renders_the_template(llm):
    messages = [{"role": "user", "content": "Hi"}]
    (request,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert request.prompt == "uHia"
    expected = llm.generate("uHia", GREEDY, use_tqdm=False)[0]
    assert request.outputs == expected.outputs
    several = llm.chat([messages, [*messages, *messages]], GREEDY, use_tqdm=False)
    assert [output.prompt for output in several] == ["uHia", "uHiuHia"]
    conversation = [*messages, {"role": "assistant", "content": "Ho"}]
    (request,) = llm.chat(
        conversation,
        GREEDY,
        use_tqdm=False,
        continue_final_message=True,
        chat_template_kwargs={"mood": "!"},
    )
    assert request.prompt == "uHiaHo"
    streamed = llm.stream(llm.apply_chat_template(messages), GREEDY)
    assert "".join(delta.text for delta in streamed) == expected.outputs[0].text


def test_chat_needs_a_template(tiny_model):
    with (
        LLM(tiny_model("qwen3"), dtype="fp32") as llm,
        pytest.raises(RequestError, match="no chat template"),
    ):
        llm.chat([{"role": "user", "content": "Hi"}], use_tqdm=False)


@pytest.mark.parametrize(
    "options",
    [{"batching": "paged", "async_scheduling": True}, {"executor": "library"}],
    ids=str,
)
def test_close_frees_everything(model_dir, options):
    threads = set(threading.enumerate())
    llm = LLM(model_dir, dtype="fp32", num_kv_blocks=60, **options)
    llm.generate(["x", "yy"], GREEDY, use_tqdm=False)
    executor_name, executor = llm.facts.executor, llm.llm_engine.executor
    module = executor.passes.model if executor_name == "packed" else executor.model
    held = [weakref.ref(owner) for owner in (llm.llm_engine, executor, module)]
    stream = llm.stream("x", GREEDY)
    next(stream)
    del executor, module
    llm.close()
    llm.close()
    assert [reference() for reference in held] == [None, None, None]
    left = set(threading.enumerate()) - threads
    for thread in left:
        if thread.name == "populate-kv":  # it ends soon after its cache, at a low priority
            thread.join()
    left = {thread for thread in left if thread.is_alive()}
    assert all(isinstance(thread, TMonitor) for thread in left), "the first progress bar starts it"
    if executor_name == "packed":  # the library executor has ended its stream before
        with pytest.raises(EngineUnavailableError, match="closed"):
            next(stream)
    with pytest.raises(EngineUnavailableError, match="closed"):
        llm.generate("x", GREEDY, use_tqdm=False)


def test_hub_model(model_dir, monkeypatch):
    downloads = []

    def download(model_id, revision, ignore_patterns):
        downloads.append((model_id, revision))
        return str(model_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with LLM("some/model", revision="main", dtype="fp32", num_kv_blocks=60) as llm:
        assert len(llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12
    assert downloads == [("some/model", "main")]
    with pytest.raises(ConfigurationError, match="model=/no/such: there is no directory"):
        LLM("/no/such")
    with pytest.raises(ConfigurationError, match="revision"):
        LLM(model_dir, revision="main")


def test_options_that_only_the_server_reads_are_known():
    """`core.protocol.messages` and `engine.__main__` belong to the server's engine process."""
    server = {
        ROOT / "core/protocol/messages.py",
        ROOT / "engine/__main__.py",
        ROOT / "core/configuration/options.py",
    }
    files = {path for name in ("core", "engine") for path in (ROOT / name).rglob("*.py")} - server
    code = "".join(path.read_text() for path in files)
    unread = {name for name in option_table() if not re.search(rf"\.{name}\b", code)}
    if ".speculation.chosen" in code:  # which has both forms of these options
        unread -= {"speculative_method", "num_speculative_tokens", "speculative_config"}
    ignored = {name for name in unread if owners()[name] in RECORDS}
    assert ignored == set(), "LLM would ignore these options"


def test_server_options_are_rejected(model_dir: Path):
    for name, value in (("tgi_compat", True), ("predict_timeout", 5), ("tool_call_parser", "x")):
        with pytest.raises(ConfigurationError, match=f"'{name}' has no effect without a server"):
            LLM(model_dir, **{name: value})
