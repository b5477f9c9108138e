"""OpenAI's routes, and the two that vLLM has beside them."""

from __future__ import annotations

from flask import Flask, Response, request

from container.apis.chat.api import ChatApi
from container.apis.completions.api import CompletionsApi
from container.apis.generation.service import Service
from container.apis.openai.tokens import read_detokenize_request, read_tokenize_request
from container.http.host import json_response
from core.errors import RequestError


class OpenAIRoutes:
    """What OpenAI's clients call below their `base_url`, which is `http://.../v1`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._chat = ChatApi(service)
        self._completions = CompletionsApi(service)

    def add_to(self, app: Flask) -> None:
        """Adds the routes."""
        app.add_url_rule("/v1/chat/completions", view_func=self.chat, methods=["POST"])
        app.add_url_rule("/v1/completions", view_func=self.completions, methods=["POST"])
        app.add_url_rule("/tokenize", view_func=self.tokenize, methods=["POST"])
        app.add_url_rule("/detokenize", view_func=self.detokenize, methods=["POST"])

    def chat(self) -> Response:
        """A chat completion."""
        return self._chat.answer(self._service.read_json(), "sse")

    def completions(self) -> Response:
        """A completion."""
        return self._completions.answer(self._service.read_json(), "sse")

    def tokenize(self) -> Response:
        """The tokens of a text or a conversation."""
        prompting, facts = self._service.prompting, self._service.client.facts
        asked = read_tokenize_request(self._service.read_json())
        if isinstance(asked.prompt, str):
            add = asked.add_special_tokens
            (tokens,) = prompting.encode([asked.prompt], add_special_tokens=add)
        else:
            tokens = prompting.encode_chat(asked.prompt, size=len(request.get_data()))
        answer = {"count": len(tokens), "max_model_len": facts.max_model_len, "tokens": tokens}
        strings = list(map(prompting.tokenizer.token, tokens)) if asked.return_token_strs else None
        return json_response({**answer, "token_strs": strings})

    def detokenize(self) -> Response:
        """The text of tokens."""
        token_ids = read_detokenize_request(self._service.read_json())
        limit = self._service.client.facts.vocab_size
        if not all(0 <= each < limit for each in token_ids):
            raise RequestError("tokens", f"token ids are 0 to {limit - 1}")
        return json_response({"prompt": self._service.prompting.decode(token_ids)})
