"""The server under test: its address, its schema, and what it reports about itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from loadtest.load.record import Attempt
from loadtest.load.request import COMMON, Request, Shape, Words
from loadtest.servers.clients.schema import LmiSchema, OpenAISchema, Schema
from loadtest.servers.clients.transport import HttpTransport, SendError, Transport

QUERY_TIMEOUT_S = 30.0
"""Timeout of queries that are not part of the measurement."""
PROBE = Request(0, Shape(len(COMMON), 1), " ".join(COMMON), None, 0)
"""A short request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A running server or a SageMaker endpoint."""

    url: str | None
    """None stands for SageMaker's own address in the region."""
    sagemaker: str | None = None
    """Name of the SageMaker endpoint, if it is one."""
    schema: str = "lmi"
    path: str | None = None
    """Overrides the schema's path."""
    timeout_s: float = 600.0

    @property
    def address(self) -> str:
        """The address, for error messages."""
        endpoint = f"SageMaker endpoint {self.sagemaker}" if self.sagemaker else ""
        return " through ".join(filter(None, (endpoint, self.url)))

    def failure(self) -> str | None:
        """Send a short request. Return why it failed; None if it was answered."""
        transport = self.connect()
        schema, attempt = self.make_schema(), Attempt(PROBE, 0.0)
        try:
            for at_s, line in transport.lines(schema.path, schema.body(PROBE)):
                schema.read(line, at_s, attempt)
        except SendError as error:
            return str(error)
        finally:
            transport.close()
        return attempt.finish(0.0).error

    def connect(self) -> Transport:
        """Open a transport for one user."""
        if self.sagemaker is None:
            assert self.url is not None
            return HttpTransport(self.url, self.timeout_s)
        from loadtest.servers.clients.sagemaker import SageMakerTransport  # boto3 is slow to load

        return SageMakerTransport(self.sagemaker, self.timeout_s, self.url)

    def get(self, path: str) -> bytes | None:
        """Return the body of a GET, or None if it fails."""
        if self.url is None:
            return None
        transport = HttpTransport(self.url, QUERY_TIMEOUT_S)
        try:
            return transport.get(path)
        except SendError:
            return None
        finally:
            transport.close()

    def make_schema(self) -> Schema:
        """Return the schema, set up for this server's model and features."""
        path = {} if self.path is None else {"path": self.path}
        if self.schema == "openai":
            model = self._model()
            return OpenAISchema(**path, **({} if model is None else {"model": model["id"]}))
        return LmiSchema(**path, timings=b"longshore:" in (self.get("/metrics") or b""))

    def max_length(self) -> int | None:
        """Return `max_model_len` from /v1/models, where vLLM reports it too; None if missing."""
        model = self._model()
        return None if model is None else model.get("max_model_len")

    def strategy(self) -> str | None:
        """Return the batching strategy of one of our servers, or None."""
        found = re.search(rb'^longshore:.*[{,]batching="(\w+)"', self.get("/metrics") or b"", re.M)
        return None if found is None else found[1].decode()

    def words(self) -> Words:
        """Return a prompt generator, calibrated with /tokenize or assuming one token per word."""
        if self.url is None:
            return Words()
        transport = HttpTransport(self.url, QUERY_TIMEOUT_S)
        body = {"prompt": " ".join(COMMON), "model": (self._model() or {}).get("id")}
        try:
            response = transport.post("/tokenize", msgspec.json.encode(body))
            return Words(msgspec.json.decode(response)["count"] / len(COMMON))
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
