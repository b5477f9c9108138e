"""Schemas of requests and streamed responses: LMI's text schema and OpenAI's completions."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from loadtest.load.record import Attempt, Timings
from loadtest.load.request import Request
from loadtest.servers.clients.transport import SendError

DONE = b"[DONE]"


class Schema(Protocol):
    """Encodes requests and decodes response lines. Stateless: all users share one."""

    path: str

    def body(self, request: Request) -> bytes:
        """Encode a streaming request that ignores end-of-sequence tokens.

        LMI requests with several samples do not stream.
        """
        ...

    def read(self, line: bytes, at_s: float, attempt: Attempt) -> None:
        """Feed one line of the response to `attempt`. Raises SendError if it reports a failure."""
        ...


class LmiSchema:
    """`inputs` and `parameters`, as in LMI containers and text-generation-inference."""

    def __init__(self, path: str = "/invocations", *, timings: bool = False) -> None:
        """timings: request server-side timings, which only our server reports."""
        self.path = path
        self._timings = timings

    def body(self, request: Request) -> bytes:
        shape = request.shape
        parameters: dict[str, object] = {
            "max_new_tokens": shape.output_tokens,
            "ignore_eos_token": True,
            "details": True,
            "do_sample": shape.samples > 1,
        }
        if self._timings:
            parameters["timings"] = True
        if shape.samples > 1:
            parameters |= {"n": shape.samples, "seed": request.seed}
        if shape.beams > 1:
            parameters |= {"num_beams": shape.beams}
        return msgspec.json.encode(
            # An LMI stream carries one sample, so several need a non-streamed response.
            {"inputs": request.prompt, "parameters": parameters, "stream": shape.samples == 1}
        )

    def read(self, line: bytes, at_s: float, attempt: Attempt) -> None:
        record = _decode(line)
        details = record.get("details") or {}
        error = record.get("error") or (record.get("token") or {}).get("error_msg")
        if error or details.get("finish_reason") == "error":
            raise SendError(str(error or "finish_reason is error"))
        if record.get("token") is not None:
            attempt.add_tokens(at_s)
        if record.get("generated_text") is None:
            return
        parts = [details, *details.get("best_of_sequences", ())]
        counts = [part.get("generated_tokens") for part in parts]
        output_tokens = None if None in counts else sum(counts)
        attempt.set_counts(details.get("input_length"), output_tokens)
        if details.get("timings"):
            attempt.set_timings(msgspec.convert(details["timings"], Timings))
        attempt.complete()


class OpenAISchema:
    """OpenAI's completions, with vLLM's `ignore_eos`."""

    def __init__(self, path: str = "/v1/completions", *, model: str = "default") -> None:
        self.path = path
        self._model = model

    def body(self, request: Request) -> bytes:
        shape = request.shape
        fields: dict[str, object] = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": shape.output_tokens,
            "ignore_eos": True,
            "temperature": 1.0 if shape.samples > 1 else 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if shape.samples > 1:
            fields |= {"n": shape.samples, "seed": request.seed}
        if shape.beams > 1:
            fields |= {"num_beams": shape.beams}
        return msgspec.json.encode(fields)

    def read(self, line: bytes, at_s: float, attempt: Attempt) -> None:
        if line.startswith((b":", b"event:", b"id:")):
            return
        data = line.removeprefix(b"data:").strip()
        if data == DONE:
            attempt.complete()
            return
        record = _decode(data)
        if record.get("error"):
            raise SendError(str(record["error"]))
        for choice in record.get("choices") or ():
            if choice.get("text"):
                attempt.add_tokens(at_s, choice.get("index", 0))
        usage = record.get("usage")
        if usage:
            attempt.set_counts(usage.get("prompt_tokens"), usage.get("completion_tokens"))


def _decode(line: bytes) -> dict[str, Any]:
    try:
        record = msgspec.json.decode(line.removeprefix(b"data:"))
    except msgspec.DecodeError:
        raise SendError(f"a response line is not JSON: {line[:100]!r}") from None
    if not isinstance(record, dict):
        raise SendError(f"a response line is not a JSON object: {line[:100]!r}")
    return record
