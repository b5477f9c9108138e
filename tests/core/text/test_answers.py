"""Several answers to one prompt: each ends independently, and `best_of` ranks them."""

from __future__ import annotations

import pytest

from core.output import Output
from core.sampling import Finish, SamplingParams, TopLogprobs
from core.text.answers import answers_to
from core.text.detokenizer import Detokenization


def output(tokenizer, index, text, logprob=-1.0, finish=None):
    ids = tuple(tokenizer.encode(text))
    return Output(0, ids, (logprob,) * len(ids), finish, index)


def texts(news):
    return [("".join(token.text for token in delta.tokens), delta.finish) for delta in news]


def test_each_answer_ends_independently(byte_level):
    answers = answers_to(Detokenization(SamplingParams(n=2, stop="."), byte_level))
    stopped, other = output(byte_level, 1, "no. More"), output(byte_level, 0, "yes")
    (news,) = answers.push(stopped)
    assert (news.index, *texts([news])) == (1, ("no", Finish.STOP))
    assert answers.is_stopped_by_string(stopped)
    (news,) = answers.push(other)
    assert (news.index, *texts([news])) == (0, ("yes", None))
    assert not answers.is_stopped_by_string(other)
    late = output(byte_level, 1, "late", finish=Finish.LENGTH)
    assert answers.push(late) == [], "tokens after a stop string are dropped"
    assert answers.num_open == 1
    last = output(byte_level, 0, " sir", finish=Finish.EOS)
    assert texts(answers.push(last)) == [(" sir", Finish.EOS)]
    assert not answers.is_stopped_by_string(last)
    assert ([answer.text for answer in answers.returned], answers.num_open) == (
        ["yes sir", "no"],
        0,
    )


def test_best_of_answers_are_released_when_all_have_ended(byte_level):
    """The second answer would be the worst if its stop string did not cut it."""
    answers = answers_to(Detokenization(SamplingParams(n=2, best_of=3, stop="."), byte_level))
    assert answers.push(output(byte_level, 0, "abcd", -1.0, Finish.EOS)) == []
    assert answers.push(output(byte_level, 1, "ef. and so on and on", -0.5, Finish.EOS)) == []
    assert answers.push(output(byte_level, 2, "gh")) == []
    news = answers.push(output(byte_level, 2, "ij", finish=Finish.LENGTH))
    assert texts(news) == [("ef", Finish.STOP), ("abcd", Finish.EOS)]
    assert [delta.index for delta in news] == [0, 1]
    assert [answer.text for answer in answers.returned] == ["ef", "abcd"]
    assert answers.num_tokens == 4 + 3 + 4, "all samples count, not only the returned ones"


@pytest.mark.parametrize("params", [{"best_of": 1}, {"num_beams": 2, "n": 2}])
def test_unranked_answers_are_released_as_they_come(byte_level, params):
    assert not SamplingParams(**params).is_ranked
    answers = answers_to(Detokenization(SamplingParams(**params), byte_level))
    assert texts(answers.push(output(byte_level, 0, "a", -9.0))) == [("a", None)]


def test_prompt_logprobs_alone_release_nothing(byte_level):
    answers, score = (
        answers_to(Detokenization(SamplingParams(prompt_logprobs=0), byte_level)),
        TopLogprobs(-1, 1, (), ()),
    )
    for _ in range(2):
        assert answers.push(Output(0, (), (), None, prompt_logprobs=(score,))) == []
    assert answers.prompt_logprobs == [score, score]


def test_tokens_wait_for_the_prompt_logprobs(byte_level):
    """A second sample may use the prefix cache while the first computes the prompt's scores."""
    params, score = SamplingParams(n=2, prompt_logprobs=0), TopLogprobs(-1.0, 1, (), ())
    answers = answers_to(Detokenization(params, byte_level, byte_level.encode("xyz")))
    assert answers.push(output(byte_level, 1, "quick", finish=Finish.EOS)) == []
    assert answers.push(Output(0, (), (), None, prompt_logprobs=(score,))) == []
    (id,) = byte_level.encode("a")
    news = answers.push(Output(0, (id,), (-1.0,), Finish.EOS, prompt_logprobs=(score,)))
    assert texts(news) == [("quick", Finish.EOS), ("a", Finish.EOS)]
    assert answers.num_open == 0


def test_without_a_tokenizer_only_tokens_are_returned():
    answers = answers_to(Detokenization(SamplingParams(), None))
    (news,) = answers.push(Output(0, (5, 6), (-1.0, -2.0), Finish.LENGTH))
    assert [(token.id, token.text) for token in news.tokens] == [(5, ""), (6, "")]
    assert answers.returned[0].cumulative_logprob == -3.0
