"""What requests and streamed answers look like: LMI's text schema, and OpenAI's completions."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from loadtest.ask import Ask
from loadtest.clients.transport import SendError
from loadtest.record import Attempt, Timings

DONE = b"[DONE]"


class Schema(Protocol):
    """Stateless, so all users share one."""

    path: str

    def body(self, ask: Ask) -> bytes:
        """A streamed request that goes on to its last token whatever the model says."""
        ...

    def read(self, line: bytes, at_s: float, attempt: Attempt) -> None:
        """Takes in one line of the answer. Raises SendError where it tells of a failure."""
        ...


class LmiSchema:
    """`inputs` and `parameters`, as LMI's containers and text-generation-inference have them."""

    def __init__(self, path: str = "/invocations", *, timings: bool = False) -> None:
        """timings: ask for the server's own, which only ours tells."""
        self.path = path
        self._timings = timings

    def body(self, ask: Ask) -> bytes:
        shape = ask.shape
        parameters: dict[str, object] = {
            "max_new_tokens": shape.answer,
            "ignore_eos_token": True,
            "details": True,
            "do_sample": shape.samples > 1,
        }
        if self._timings:
            parameters["timings"] = True
        if shape.samples > 1:
            parameters |= {"n": shape.samples, "seed": ask.seed}
        if shape.beams > 1:
            parameters |= {"num_beams": shape.beams}
        return msgspec.json.encode(
            # LMI's streams have room for one answer; of several the document is asked for.
            {"inputs": ask.prompt, "parameters": parameters, "stream": shape.samples == 1}
        )

    def read(self, line: bytes, at_s: float, attempt: Attempt) -> None:
        record = _decode(line)
        details = record.get("details") or {}
        error = record.get("error") or (record.get("token") or {}).get("error_msg")
        if error or details.get("finish_reason") == "error":
            raise SendError(str(error or "finish_reason is error"))
        if record.get("token") is not None:
            attempt.tokens(at_s)
        if record.get("generated_text") is None:
            return
        parts = [details, *details.get("best_of_sequences", ())]
        counts = [part.get("generated_tokens") for part in parts]
        output_tokens = None if None in counts else sum(counts)
        attempt.counted(details.get("input_length"), output_tokens)
        if details.get("timings"):
            attempt.timed(msgspec.convert(details["timings"], Timings))
        attempt.ended()


class OpenAISchema:
    """`prompt`, as OpenAI's completions have it, with vLLM's `ignore_eos`."""

    def __init__(self, path: str = "/v1/completions", *, model: str = "default") -> None:
        self.path = path
        self._model = model

    def body(self, ask: Ask) -> bytes:
        shape = ask.shape
        fields: dict[str, object] = {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": shape.answer,
            "ignore_eos": True,
            "temperature": 1.0 if shape.samples > 1 else 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if shape.samples > 1:
            fields |= {"n": shape.samples, "seed": ask.seed}
        if shape.beams > 1:
            fields |= {"num_beams": shape.beams}
        return msgspec.json.encode(fields)

    def read(self, line: bytes, at_s: float, attempt: Attempt) -> None:
        if line.startswith((b":", b"event:", b"id:")):
            return
        data = line.removeprefix(b"data:").strip()
        if data == DONE:
            attempt.ended()
            return
        record = _decode(data)
        if record.get("error"):
            raise SendError(str(record["error"]))
        for choice in record.get("choices") or ():
            if choice.get("text"):
                attempt.tokens(at_s, choice.get("index", 0))
        usage = record.get("usage")
        if usage:
            attempt.counted(usage.get("prompt_tokens"), usage.get("completion_tokens"))


def _decode(line: bytes) -> dict[str, Any]:
    try:
        record = msgspec.json.decode(line.removeprefix(b"data:"))
    except msgspec.DecodeError:
        raise SendError(f"the answer has a line that is no JSON: {line[:100]!r}") from None
    if not isinstance(record, dict):
        raise SendError(f"the answer has a line that is no object: {line[:100]!r}")
    return record
