"""Several answers to one prompt: each to its own end, and the likeliest of them told."""

from __future__ import annotations

import pytest

from core.plan import Output
from core.sampling import Finish, SamplingParams, TopLogprobs
from core.text.answers import Answers


def said(tokenizer, index, text, logprob=-1.0, finish=None):
    ids = tuple(tokenizer.encode(text))
    return Output(0, ids, (logprob,) * len(ids), finish, index)


def texts(news):
    return [("".join(token.text for token in each.tokens), each.finish) for each in news]


def test_each_ends_by_itself(byte_level):
    answers = Answers(SamplingParams(n=2, stop="."), byte_level)
    stopped, other = said(byte_level, 1, "no. More"), said(byte_level, 0, "yes")
    (news,) = answers.push(stopped)
    assert (news.index, *texts([news])) == (1, ("no", Finish.STOP))
    assert answers.stopped_by_text(stopped)
    (news,) = answers.push(other)
    assert (news.index, *texts([news])) == (0, ("yes", None))
    assert not answers.stopped_by_text(other)
    late = said(byte_level, 1, "late", finish=Finish.LENGTH)
    assert answers.push(late) == [], "said before the engine had heard of the stop text"
    assert answers.num_open == 1
    last = said(byte_level, 0, " sir", finish=Finish.EOS)
    assert texts(answers.push(last)) == [(" sir", Finish.EOS)]
    assert not answers.stopped_by_text(last)
    assert ([each.text for each in answers.told], answers.num_open) == (["yes sir", "no"], 0)


def test_the_likeliest_are_told_when_all_have_ended(byte_level):
    """The second would be the worst, had the stop text not cut it."""
    answers = Answers(SamplingParams(n=2, best_of=3, stop="."), byte_level)
    assert answers.push(said(byte_level, 0, "abcd", -1.0, Finish.EOS)) == []
    assert answers.push(said(byte_level, 1, "ef. and so on and on", -0.5, Finish.EOS)) == []
    assert answers.push(said(byte_level, 2, "gh")) == []
    news = answers.push(said(byte_level, 2, "ij", finish=Finish.LENGTH))
    assert texts(news) == [("ef", Finish.STOP), ("abcd", Finish.EOS)]
    assert [each.index for each in news] == [0, 1]
    assert [each.text for each in answers.told] == ["ef", "abcd"]
    assert answers.num_tokens == 4 + 3 + 4, "all that were sampled"


@pytest.mark.parametrize("params", [{"best_of": 1}, {"num_beams": 2, "n": 2}])
def test_what_is_not_ranked_is_told_as_it_comes(byte_level, params):
    answers = Answers(SamplingParams(**params), byte_level)
    assert texts(answers.push(said(byte_level, 0, "a", -9.0))) == [("a", None)]


def test_scores_of_the_prompt_are_no_news(byte_level):
    answers, score = (
        Answers(SamplingParams(prompt_logprobs=0), byte_level),
        TopLogprobs(-1, 1, (), ()),
    )
    for _ in range(2):
        assert answers.push(Output(0, (), (), None, prompt=(score,))) == []
    assert answers.prompt_scores == [score, score]


def test_what_is_quicker_than_the_scores_of_the_prompt_waits(byte_level):
    """A second sample may find in the cache what the first computes again to score it."""
    params, score = SamplingParams(n=2, prompt_logprobs=0), TopLogprobs(-1.0, 1, (), ())
    answers = Answers(params, byte_level, byte_level.encode("xyz"))
    assert answers.push(said(byte_level, 1, "quick", finish=Finish.EOS)) == []
    assert answers.push(Output(0, (), (), None, prompt=(score,))) == []
    (id,) = byte_level.encode("a")
    news = answers.push(Output(0, (id,), (-1.0,), Finish.EOS, prompt=(score,)))
    assert texts(news) == [("quick", Finish.EOS), ("a", Finish.EOS)]
    assert answers.num_open == 0


def test_without_a_tokenizer_there_are_tokens_alone():
    answers = Answers(SamplingParams(), None)
    (news,) = answers.push(Output(0, (5, 6), (-1.0, -2.0), Finish.LENGTH))
    assert [(each.id, each.text) for each in news.tokens] == [(5, ""), (6, "")]
    assert answers.told[0].cumulative_logprob == -3.0
