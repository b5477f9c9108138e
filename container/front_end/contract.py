"""The tables of routes and fields in docs/reference/contract.md, which `make docs` writes.

They come from the tables that requests are checked against.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import msgspec

from container.apis.anthropic.schema import COUNT_FIELDS, MESSAGES_FIELDS
from container.apis.chat.schema import CHAT_FIELDS
from container.apis.completions.schema import COMPLETION_FIELDS
from container.apis.embeddings import EMBEDDING_FIELDS
from container.apis.responses.schema import RESPONSES_FIELDS
from container.apis.tasks.rerank import RERANK_FIELDS, SCORE_FIELDS
from container.apis.tasks.transcription import TRANSCRIPTION_FIELDS
from container.apis.text.schema import PARAMETERS, TEXT_FIELDS
from container.apis.tokenize import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from container.front_end.openapi import openapi_document
from container.http.health import HEALTH_PATHS
from container.schema.fields import Field, Fields
from core.configuration.task import Kind

_KINDS: Mapping[Kind, str] = {
    "generation": "text generation", "embedding": "embeddings", "pipeline": "pipelines",
    "handler": "a model.py",
}  # fmt: skip
_OWNERS = (
    ("/v1/messages", "Anthropic"),
    (("/v1/load_lora", "/v1/unload_lora", "/tokenize", "/detokenize", "/version"), "vLLM"),
    (("/score", "/v1/score", "/v1/rerank", "/v2/rerank", "/load"), "vLLM"),
    ("/rerank", "vLLM, text-embeddings-inference"),
    ("/v1/", "OpenAI"),
    (("/generate", "/info"), "text-generation-inference"),
    ("/metrics", "Prometheus"),
    ("/openapi.json", "Longshore"),
    (("/adapters", "/endpoints", "/invocations"), "SageMaker"),
    (("/models", "/predictions"), "DJL Serving"),
    (HEALTH_PATHS, "SageMaker, Kubernetes"),
    ("/", "text-generation-inference"),
)
"""Path prefixes, and the servers whose clients call them. The first match counts."""
BODIES: Mapping[str, Fields] = {
    "`/invocations` with `inputs`, `/generate`": TEXT_FIELDS,
    "The `parameters` of `/invocations` and `/generate`": PARAMETERS,
    "`/v1/chat/completions`": CHAT_FIELDS,
    "`/v1/completions`": COMPLETION_FIELDS,
    "`/v1/responses`": RESPONSES_FIELDS,
    "`/v1/messages`": MESSAGES_FIELDS,
    "`/v1/messages/count_tokens`": COUNT_FIELDS,
    "`/v1/embeddings`": EMBEDDING_FIELDS,
    "`/v1/rerank`": RERANK_FIELDS,
    "`/v1/score`": SCORE_FIELDS,
    "`/v1/audio/transcriptions`, `/v1/audio/translations`": TRANSCRIPTION_FIELDS,
    "`/tokenize`": TOKENIZE_FIELDS,
    "`/detokenize`": DETOKENIZE_FIELDS,
}
"""Every table of body fields."""
_EFFECTS = {"supported": "yes", "ignored": "no effect", "unsupported": "refused"}


def with_tables(page: str) -> str:
    """Return the text of docs/reference/contract.md with the tables of routes and fields as they
    are now.

    They stand between markers. The rest of the page is written by hand.
    """
    fields = (line for title, fields in BODIES.items() for line in _table(title, fields))
    return _with_part(_with_part(page, "routes", _routes()), "fields", fields)


def _with_part(page: str, name: str, lines: Iterable[str]) -> str:
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.partition(begin)
    return "".join([before, begin, *(f"{line}\n" for line in lines), end, rest.partition(end)[2]])


def _routes() -> Iterator[str]:
    """Yield the table of routes, with the kinds of models that have each."""
    yield from ("", "| route | defined by | kinds of models | what it does |")
    yield "| --- | --- | --- | --- |"
    documents = {
        kind: cast(Mapping[str, Any], openapi_document(kind, with_runtime=True)["paths"])
        for kind in _KINDS
    }
    rows = dict.fromkeys(path for paths in documents.values() for path in paths)
    for path in sorted(rows):
        kinds: list[Kind] = [kind for kind in _KINDS if path in documents[kind]]
        has_all = len(kinds) == len(_KINDS)
        models = "all" if has_all else ", ".join(_KINDS[kind] for kind in kinds)
        for method, operation in documents[kinds[0]][path].items():
            route = f"`{method.upper()} {path}`"
            yield f"| {route} | {_owner(path)} | {models} | {operation['summary']} |"
    yield ""


def _owner(path: str) -> str:
    return next(owner for beginning, owner in _OWNERS if path.startswith(beginning))


def _table(title: str, fields: Fields) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| field | supported | meaning |", "| --- | --- | --- |")
    for name in sorted(fields):
        yield f"| `{name}` | {_EFFECTS[fields[name].effect]} | {_description(fields[name])} |"


def _description(field: Field) -> str:
    if field.effect == "ignored" or not field.neutral:
        return field.doc.replace("|", "\\|")
    values = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in field.neutral)
    return f"{field.doc} Accepted: {values}."
