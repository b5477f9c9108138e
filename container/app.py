"""The HTTP surface: /ping, /invocations and /predictions/<model>."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from itertools import chain

import gevent
import msgspec
from flask import Flask, Response, abort, g, request

from container.disconnect import disconnect_check
from container.engine_client import EngineClient
from container.failures import failure, register_failures
from container.generation import Generation
from container.schemas import TextRequest, is_served_type, parse_request
from container.streaming import MIMETYPES, StreamFormat, stream_lines, whole_answer
from core.errors import RequestError
from core.options import Options
from core.text.tokenizer import Tokenizer

LONG_TEXT_CHARACTERS = 4096
"""A longer prompt is tokenized in a thread, so that /ping and the streams need not wait."""


def create_app(
    client: EngineClient, tokenizer: Tokenizer, options: Options, model_name: str
) -> Flask:
    """The WSGI application of one front-end worker."""
    app = Flask("longshore", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = options.max_request_size
    service = TextService(client, tokenizer, options)

    def ping() -> Response:
        health = client.health()
        if not health.healthy:
            return failure(503, health.reason)
        return _json_response({"status": "healthy"})

    def predict(model: str) -> Response:
        if model != model_name:
            abort(404, f"no model '{model}'; this container serves '{model_name}'")
        return service.invoke()

    app.add_url_rule("/ping", view_func=ping, methods=["GET", "POST"])
    app.add_url_rule("/invocations", view_func=service.invoke, methods=["POST"])
    app.add_url_rule("/predictions/<model>", view_func=predict, methods=["POST"])
    app.before_request(_name_request)
    app.after_request(_answer_with_name)
    register_failures(app)
    return app


class TextService:
    """Answers requests of the text schema."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, options: Options) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._options = options

    def invoke(self) -> Response:
        """Answers the current request; errors before the first token raise."""
        if not is_served_type(request.mimetype):
            abort(415, f"Content-Type {request.mimetype}: send application/json or text/plain")
        body = request.get_data()
        if request.content_length is None and len(body) >= self._options.max_request_size:
            abort(413)  # a chunked body is cut there without a word
        asked = parse_request(body, request.mimetype)
        generation = self._start(asked)
        if asked.stream:
            return self._streamed(generation)
        generation.run()
        return _json_response(whole_answer(generation))

    def _start(self, asked: TextRequest) -> Generation:
        max_model_len = self._client.facts.max_model_len
        prompt_token_ids = self._encode(asked.inputs)
        _check_length(len(prompt_token_ids), asked.params.max_tokens, max_model_len)
        return Generation(
            self._client.submit(prompt_token_ids, asked.params),
            self._tokenizer,
            asked,
            prompt_token_ids,
            has_hung_up=disconnect_check(request.environ),
            timeout_s=self._options.predict_timeout,
        )

    def _encode(self, text: str) -> Sequence[int]:
        if len(text) <= LONG_TEXT_CHARACTERS:
            return self._tokenizer.encode(text)
        return gevent.get_hub().threadpool.apply(self._tokenizer.encode, (text,))

    def _streamed(self, generation: Generation) -> Response:
        """No status is sent before the first token, so that an early failure has its own."""
        form = self._stream_format()
        batches = generation.batches()
        first = next(batches)
        lines = stream_lines(generation, chain([first], batches), form, g.request_id)
        response = Response(lines, content_type=MIMETYPES[form])
        # A generator that never started has no `finally` to run, so the response sees to it.
        response.call_on_close(generation.abort)
        return response

    def _stream_format(self) -> StreamFormat:
        configured: StreamFormat = "sse" if self._options.output_formatter == "sse" else "jsonlines"
        other: StreamFormat = "jsonlines" if configured == "sse" else "sse"
        accepted = request.accept_mimetypes.best_match([MIMETYPES[configured], MIMETYPES[other]])
        return other if accepted == MIMETYPES[other] else configured


def _check_length(num_prompt_tokens: int, max_new_tokens: int, max_model_len: int) -> None:
    """The engine would refuse these as well, but could not name what the client wrote."""
    if num_prompt_tokens == 0:
        raise RequestError("inputs", "has no tokens")
    left = max_model_len - num_prompt_tokens
    if left < 1:
        raise RequestError(
            "inputs",
            f"{num_prompt_tokens} tokens leave no room for an answer: prompt and answer together "
            f"may have {max_model_len} (option.max_model_len)",
        )
    if max_new_tokens > left:
        raise RequestError(
            "parameters.max_new_tokens",
            f"{max_new_tokens} is more than the {left} that are left: inputs has "
            f"{num_prompt_tokens} tokens, and prompt and answer together may have "
            f"{max_model_len} (option.max_model_len)",
        )


def _json_response(body: object) -> Response:
    return Response(msgspec.json.encode(body), mimetype="application/json")


def _name_request() -> None:
    """SageMaker's own id where it sent one that can stand in a log line, else a new one."""
    given = request.headers.get("X-Amzn-SageMaker-Inference-Id", "")
    g.request_id = given if re.fullmatch(r"[!-~]{1,64}", given) else uuid.uuid4().hex


def _answer_with_name(response: Response) -> Response:
    response.headers["X-Request-Id"] = g.request_id
    return response
