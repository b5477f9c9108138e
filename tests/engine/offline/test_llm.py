"""The `LLM` class: results have vLLM's format."""

from __future__ import annotations

import msgspec
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import engine
import longshore
from core.errors import GenerationError, RequestError
from engine import LLM, SamplingParams
from tests.engine.tiny_models import VOCABULARY

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def letters():
    """A character tokenizer: token n is chr(n + 32)."""
    vocabulary = {chr(n + 32): n for n in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.fixture(scope="module")
def llm(tiny_model):
    path = tiny_model("llama")
    letters().save(str(path / "tokenizer.json"))
    yield LLM(path, dtype="fp32")
    (path / "tokenizer.json").unlink()


def answer(llm, prompt, params=GREEDY):
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def test_text_and_tokens_agree(llm):
    request = llm.generate("ROMEO:", GREEDY, use_tqdm=False)[0]
    output = request.outputs[0]
    assert request.prompt == "ROMEO:"
    assert request.prompt_token_ids == [ord(letter) - 32 for letter in "ROMEO:"]
    assert output.text == "".join(chr(token + 32) for token in output.token_ids)
    assert len(output.token_ids) == 12
    assert output.logprobs is None
    assert output.cumulative_logprob < 0
    assert output.finish_reason == "length"


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = ["one", [3, 4, 5], "three"]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together] == [
        answer(llm, prompt).token_ids for prompt in prompts
    ]
    assert together[1].prompt is None


def test_one_set_of_parameters_per_prompt(llm):
    params = [SamplingParams(max_tokens=3, temperature=0), SamplingParams(max_tokens=5, seed=1)]
    outputs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    with pytest.raises(RequestError, match="2 given for 1 prompts"):
        llm.generate(["a"], params, use_tqdm=False)


def test_seeded_answers_do_not_depend_on_the_batch(llm):
    params = SamplingParams(seed=5, max_tokens=10, ignore_eos=True)
    alone = answer(llm, "x", params).token_ids
    beside = llm.generate(["yy", "x", "zzz"], [GREEDY, params, GREEDY], use_tqdm=False)
    assert beside[1].outputs[0].token_ids == alone
    assert (
        alone != answer(llm, "x", SamplingParams(seed=6, max_tokens=10, ignore_eos=True)).token_ids
    )


def test_a_stop_string_ends_the_answer_and_is_removed(llm):
    text = answer(llm, "ROMEO:").text
    stop = text[4:6]
    for given in (stop, [stop], (stop, "never")):
        params = SamplingParams(temperature=0, max_tokens=12, stop=given)
        output = answer(llm, "ROMEO:", params)
        assert output.text == text[: text.index(stop)]
        assert output.finish_reason == "stop"
        assert len(output.token_ids) < 12
    assert not llm.llm_engine.has_work()
    assert llm.llm_engine.strategy.memory.num_held_blocks == 0


def test_a_stop_token_ends_the_answer(llm):
    tokens = answer(llm, "ROMEO:").token_ids
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(tokens[3],))
    output = answer(llm, "ROMEO:", params)
    assert output.token_ids == tokens[: tokens.index(tokens[3]) + 1]
    assert output.finish_reason == "stop"


def test_a_model_without_a_tokenizer(tiny_model):
    llm = LLM(tiny_model("qwen3"), dtype="fp32")
    assert len(answer(llm, [1, 2, 3]).token_ids) == 12
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        answer(llm, "text")
    with pytest.raises(RequestError, match="stop: needs"):
        answer(llm, [1], SamplingParams(stop=("x",)))


def test_a_failure_is_raised_and_leaves_nothing_behind(llm, monkeypatch):
    def fail(plan, between_tokens):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.executor, "submit", fail)
        with pytest.raises(GenerationError, match="out of memory"):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_work()
    assert len(answer(llm, "a").token_ids) == 12


def test_dynamic_waits_and_answers(tiny_model):
    llm = LLM(tiny_model("llama"), batch_size=4, max_batch_delay=30, dtype="fp32")
    assert llm.facts.batching == "dynamic"
    assert len(answer(llm, [1, 2]).token_ids) == 12


def test_text_parameters_reach_the_answer(llm):
    text = answer(llm, "ROMEO:").text
    stop = text[4:6]
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, stop=stop, include_stop_str_in_output=True
    )
    assert answer(llm, "ROMEO:", params).text == text[: text.index(stop) + 2]
    late = msgspec.structs.replace(params, min_tokens=12)
    assert answer(llm, "ROMEO:", late).text == text


def test_bad_words_do_not_appear(llm):
    """One of the words is a single token, and the other consists of two tokens."""
    text = answer(llm, "ROMEO:").text
    for word in (text[3], text[3:5]):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=[word])
        barred = answer(llm, "ROMEO:", params).text
        assert word not in barred
        assert len(barred) == 12


def test_logprobs_have_text_and_rank_by_token(llm):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2)
    output = answer(llm, "ROMEO:", params)
    for token, named in zip(output.token_ids, output.logprobs, strict=True):
        assert named[token].rank == 1
        assert {logprob.decoded_token for logprob in named.values()} == {
            chr(id + 32) for id in named
        }
        assert len(named) == 2
    total = sum(
        named[id].logprob for id, named in zip(output.token_ids, output.logprobs, strict=True)
    )
    assert output.cumulative_logprob == pytest.approx(total)


def test_bad_words_as_text_need_a_tokenizer(tiny_model):
    with pytest.raises(RequestError, match="bad_words: needs the model's tokenizer"):
        answer(LLM(tiny_model("qwen3"), dtype="fp32"), [1], SamplingParams(bad_words=["x"]))


def test_the_installed_package_offers_the_engines_names():
    assert longshore.__all__ == engine.__all__
    for name in engine.__all__:
        assert getattr(longshore, name) is getattr(engine, name)
