"""The tokens of an echoed prompt, for `logprobs` of OpenAI's completions."""

from __future__ import annotations

from container.apis.generation.generation import Generation
from container.apis.generation.logprobs import ScoredToken
from container.apis.scores import scored_prompt
from container.http.off_loop import in_thread_if_long
from core.text.detokenizer import Detokenizer
from core.text.tokenizer import Tokenizer


def echoed_prompt(generation: Generation, text: str, tokenizer: Tokenizer) -> list[ScoredToken]:
    """Return the tokens of a prompt with this text, with their scores."""

    def tokens() -> list[ScoredToken]:
        detokenizer = Detokenizer(tokenizer)
        offsets, end = list[int](), 0
        for token_id in generation.prompt_token_ids:
            offsets.append(end)
            end += len(detokenizer.push(token_id))
        # Special tokens that the tokenizer added at the start are not part of the client's text.
        num_added = max(0, end - len(text))
        return [
            ScoredToken(token_id, max(0, offset - num_added), score and score.logprob, score)
            for (token_id, score), offset in zip(scored_prompt(generation), offsets, strict=True)
        ]

    return in_thread_if_long(tokens, size=len(generation.prompt_token_ids))
