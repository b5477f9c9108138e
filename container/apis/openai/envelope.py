"""What the answers of OpenAI's APIs have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from container.apis.generation.answer import Record
from container.apis.generation.generation import Generation
from core.sampling import Finish

_FINISH_REASONS = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields of a request's records that say what they are."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str

    def record(self, object: str, choices: Sequence[Record], **more: object) -> Record:
        return {
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def finish_reason(finish: Finish | None) -> str | None:
    """In OpenAI's words; None while the answer goes on."""
    return None if finish is None else _FINISH_REASONS.get(finish, finish.value)


def usage(generations: Iterable[Generation]) -> Record:
    """The tokens so far: of each prompt once, and of all answers that it cost to sample."""
    num_prompt = num_completion = 0
    for generation in generations:
        num_prompt += len(generation.prompt_token_ids)
        num_completion += generation.num_generated_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }
