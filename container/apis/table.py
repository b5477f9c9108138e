"""All APIs. The application, its documents and its error responses are made of this table."""

from __future__ import annotations

from container.apis import embeddings, text_generation
from container.apis.adapter_routes import ADAPTERS, DJL_ADAPTERS, VLLM_ADAPTERS
from container.apis.anthropic.api import MESSAGES
from container.apis.chat.api import CHAT
from container.apis.completions.api import COMPLETIONS
from container.apis.embeddings import EMBED, EMBEDDINGS
from container.apis.invocations.api import HEALTH, INVOCATIONS, METRICS, PREDICTIONS
from container.apis.invocations.runtime import RUNTIME
from container.apis.invocations.upgrade import UPGRADE
from container.apis.model_routes import DJL_MODELS, OPENAI_MODELS
from container.apis.openapi import OPENAPI
from container.apis.responses.api import RESPONSES
from container.apis.status import STATUS
from container.apis.tasks import handler, pipeline
from container.apis.tasks.predict import PREDICT
from container.apis.tasks.rerank import TEI_RERANK, VLLM_SCORES
from container.apis.tasks.transcription import AUDIO
from container.apis.text.tgi import TGI
from container.apis.tokenize import TOKENIZE
from container.http.failures import Failure
from container.http.route import Api, Contract, Invocation
from core.configuration.options import Options, ServerOptions
from core.configuration.task import Kind

APIS: tuple[Api, ...] = (
    HEALTH, INVOCATIONS, PREDICTIONS, RUNTIME, UPGRADE,
    TGI, CHAT, COMPLETIONS, RESPONSES, MESSAGES,
    EMBEDDINGS, EMBED, TEI_RERANK, PREDICT, VLLM_SCORES, AUDIO, TOKENIZE,
    ADAPTERS, DJL_ADAPTERS, VLLM_ADAPTERS,
    DJL_MODELS, OPENAI_MODELS, STATUS, METRICS, OPENAPI,
)  # fmt: skip
"""In the order in which the contract page lists their fields."""
_INVOCATIONS = (
    text_generation.invocation(Options()), embeddings.INVOCATION,
    pipeline.INVOCATION, handler.INVOCATION,
)  # fmt: skip


def contract_of(
    kind: Kind, server: ServerOptions, invocation: Invocation | None = None
) -> Contract:
    """Return the routes of a container, and what /invocations means there.

    kind: that of its model. invocation: default the kind's.
    """
    apis = tuple(api for api in APIS if kind in api.kinds and api.is_enabled(server))
    return Contract(apis, invocation or next(of for of in _INVOCATIONS if of.kind == kind))


def error_body(failure: Failure, path: str) -> dict[str, object]:
    """Return the body of the error response to a request, in the format that its path calls for."""
    formats = [(api.errors.reach(path), api.errors.write) for api in APIS if api.errors]
    reach, write = max(formats, key=lambda format: format[0])
    return write(failure) if reach else failure.as_lmi()
