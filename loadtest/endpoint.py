"""What is measured: where it is, how one asks it, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from loadtest.clients.schema import LmiSchema, OpenAISchema, Schema
from loadtest.clients.transport import HttpTransport, SendError, Transport
from loadtest.words import COMMON, Words

ASK_S = 30.0
"""For questions beside the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A running server, or an endpoint of SageMaker."""

    url: str | None
    """None: SageMaker's own address for the region."""
    sagemaker: str | None = None
    """Name of the endpoint, where it is one."""
    schema: str = "lmi"
    path: str | None = None
    """In place of the schema's own."""
    timeout_s: float = 600.0

    def connect(self) -> Transport:
        """A way there for one user."""
        if self.sagemaker is None:
            assert self.url is not None
            return HttpTransport(self.url, self.timeout_s)
        from loadtest.clients.sagemaker import SageMakerTransport  # boto3 is slow to load

        return SageMakerTransport(self.sagemaker, self.timeout_s, self.url)

    def get(self, path: str) -> bytes | None:
        """The body of a GET; None where there is no such thing."""
        if self.url is None:
            return None
        transport = HttpTransport(self.url, ASK_S)
        try:
            return transport.get(path)
        except SendError:
            return None
        finally:
            transport.close()

    def make_schema(self) -> Schema:
        """The schema in its form for this server."""
        path = {} if self.path is None else {"path": self.path}
        if self.schema == "openai":
            model = self._model()
            return OpenAISchema(**path, **({} if model is None else {"model": model["id"]}))
        return LmiSchema(**path, timings=b"longshore:" in (self.get("/metrics") or b""))

    def max_length(self) -> int | None:
        """Most tokens of a prompt and its answer, where the server says so as vLLM does."""
        model = self._model()
        return None if model is None else model.get("max_model_len")

    def words(self) -> Words:
        """Counted by the server's own tokenizer where it can be asked; else one token a word."""
        if self.url is None:
            return Words()
        transport = HttpTransport(self.url, ASK_S)
        body = {"prompt": " ".join(COMMON), "model": (self._model() or {}).get("id")}
        try:
            answer = transport.post("/tokenize", msgspec.json.encode(body))
            return Words(msgspec.json.decode(answer)["count"] / len(COMMON))
        except (SendError, msgspec.DecodeError, KeyError, TypeError):
            return Words()
        finally:
            transport.close()

    def _model(self) -> dict | None:
        body = self.get("/v1/models")
        try:
            return msgspec.json.decode(body or b"{}")["data"][0]
        except (msgspec.DecodeError, KeyError, IndexError, TypeError):
            return None
