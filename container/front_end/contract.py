"""docs/reference/contract.md: all routes, headers and fields, by whom, and what each does here.

It is built from the tables that requests are checked against (`make docs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

from container.apis.chat.schema import CHAT_FIELDS
from container.apis.completions.schema import COMPLETION_FIELDS
from container.apis.embeddings import EMBEDDING_FIELDS
from container.apis.messages.schema import COUNT_FIELDS, MESSAGES_FIELDS
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
_HEADERS = (
    ("Authorization: Bearer KEY", "OpenAI", "the API key, if option.api_keys_file is set"),
    ("x-api-key", "Anthropic", "the API key, as in `Authorization`"),
    ("anthropic-version, anthropic-beta", "Anthropic", "no effect"),
    ("Accept", "HTTP", "on /invocations: whether a stream has lines or server-sent events"),
    ("X-Amzn-SageMaker-Custom-Attributes", "SageMaker",
     "on /invocations, `route=PATH` sends the request to any other POST route; the header is "
     "returned with the response"),
    ("X-Amzn-SageMaker-Inference-Id", "SageMaker", "the request's id in logs and responses"),
    ("X-Amzn-SageMaker-Target-Model", "SageMaker",
     "the name of the model, if several models share one port"),
    ("X-Amzn-SageMaker-Adapter-Identifier", "SageMaker", "the name of the LoRA adapter"),
    ("X-Amzn-SageMaker-Adapter-Alias", "SageMaker",
     "the adapter's name in the answers of `/adapters`; no effect on other routes"),
    ("X-Amzn-SageMaker-Session-Id", "SageMaker",
     "the id of the session, if option.enable_stateful_sessions is set"),
    ("X-Amzn-SageMaker-New-Session-Id, -Closed-Session-Id", "SageMaker",
     "in responses: the id of the session that the request has opened or closed"),
    ("X-Request-Id", "Longshore", "in responses: the request's id"),
    ("X-Longshore-Warning", "Longshore",
     "in responses: the fields of the request that have no effect"),
    ("Retry-After", "HTTP",
     "in responses with status 429 or 503: the seconds after which to try again"),
)  # fmt: skip
_STANDARDS = (
    ("`POST /adapters`, `DELETE /adapters/{name}`, headers and query parameters", "the same"),
    ("`requestType` `NEW_SESSION` and `CLOSE`, `X-Amzn-SageMaker-Session-Id`, expiry",
     "the same, but each use of a session extends its lifetime, and the directory of a session "
     "holds no data"),
    ("`SAGEMAKER_ENABLE_STATEFUL_SESSIONS`, `SAGEMAKER_SESSIONS_EXPIRATION`, "
     "`SAGEMAKER_SESSIONS_PATH`",
     "they set `option.enable_stateful_sessions`, `option.sessions_expiration` and "
     "`option.sessions_path`"),
    ("`CUSTOM_FASTAPI_PING_HANDLER`",
     "it sets `option.ping_hook`; the function is called only while the engine is healthy; "
     "otherwise `/ping` returns 503"),
    ("`CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE`",
     "it sets `option.throttle_hook`, which must be a function, not a class"),
    ("`CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS`",
     "it sets `option.pre_post_process_hook`, which must be a function, not a class"),
    ("`CUSTOM_PRE_PROCESS`, `CUSTOM_POST_PROCESS`",
     "they set `option.pre_process_hook` and `option.post_process_hook`"),
    ("`CUSTOM_FASTAPI_INVOCATION_HANDLER`, `@custom_invocation_handler`",
     "the container refuses to start, since such a handler calls vLLM's engine; write "
     "`handle(inputs)` instead, or a `pre_post_process_hook`, whose `call_next` calls the model"),
    ("`@custom_ping_handler`, `@custom_middleware`, the package's own `@input_formatter` and "
     "`@output_formatter`, functions found by their names",
     "the container refuses to start; name the function in an option instead"),
    ("`CUSTOM_SCRIPT_FILENAME`, `SAGEMAKER_MODEL_PATH`",
     "they have no effect and cause a warning; an option names the file, which is beside "
     "serving.properties or in the model's directory"),
    ("handlers of the engine's own sessions and adapters (`register_...`)",
     "not supported; they are for authors of inference engines"),
    ("`standard-supervisor`, `PROCESS_AUTO_RECOVERY`, `PROCESS_MAX_START_RETRIES`",
     "not supported; `retry_threshold` restarts a dead engine"),
)  # fmt: skip
"""The features of AWS's package model-hosting-container-standards, and their equivalents here."""
_ANSWERS = (
    ("`usage.prompt_tokens`",
     "the tokens of the prompt, including special tokens, counted once for all `n` choices",
     "same"),
    ("`usage.completion_tokens`",
     "all tokens of all choices, including the end-of-sequence token and the tokens of the stop "
     "string", "same"),
    ("`usage.completion_tokens` with `echo` and `max_tokens` 0",
     "1, as one token is sampled and dropped", "0"),
    ("`finish_reason` at the end of sequence, a stop string or a stop token", "`stop`", "same"),
    ("`finish_reason` at `max_tokens` or the end of the context", "`length`", "same"),
    ("`finish_reason` of tool calls with `tool_choice` auto or required", "`tool_calls`", "same"),
    ("`finish_reason` of a call of the function that `tool_choice` names",
     "`stop`, as in OpenAI's API", "same"),
    ("`finish_reason` of tool calls that `max_tokens` cuts off",
     "`length`, but `tool_calls` with `tool_choice` auto", "`length`"),
    ("`stop_reason`", "the stop string, the id of a token of `stop_token_ids`, or null",
     "same, but null for each of the model's end-of-sequence tokens; vLLM returns null for the "
     "first of them, and the id for the others"),
    ("an error's body", "`error`, with `message`, `type`, `param`, and the status as `code`",
     "same"),
    ("`type` of a 4xx", "`BadRequestError`, `NotFoundError`",
     "`invalid_request_error`, as in OpenAI's API"),
    ("`type` of a 5xx", "`InternalServerError`", "`server_error`, as in OpenAI's API"),
    ("a prompt that is too long", "400", "same, with the message of OpenAI's API"),
    ("unknown fields", "ignored, with a line in the log", "400, unless they are null"),
    ("an engine that fails during a request", "500", "424, as in LMI"),
    ("a full queue", "never happens: the queue has no limit",
     "503 with `Retry-After` (`option.overload_status`)"),
)  # fmt: skip
"""The answers of chat completions and completions, in vLLM and here."""
_LMI_ANSWERS = (
    ("`details.finish_reason` at the end of sequence", "`eos_token`", "same"),
    ("`details.finish_reason` at a stop string", "`eos_token`, although LMI's documentation says "
     "`stop_sequence`",
     "`stop_sequence`"),
    ("`details.finish_reason` at `max_new_tokens`", "`length`", "same"),
    ("a failure before the first byte", "424 with `error` and `code`",
     "same for failures; an invalid request gets 400, and the body also has the `field`"),
    ("a failure in a stream", "a last line with `details.finish_reason` `error`", "same"),
    ("chat completions", "`eos_token`, `length` or `tool_calls`", "the reasons in the table above"),
)  # fmt: skip
"""The answers to `inputs`, in LMI and here."""
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


def markdown_lines() -> list[str]:
    """Return docs/reference/contract.md."""
    return [
        "# The contract",
        "",
        "This page lists every route, header and field that clients of other servers send, and "
        "what each does here. It is generated by `make docs` from the tables that requests are "
        "checked against. [requests.md](../requests.md) explains the fields.",
        "",
        "A field that is not listed is refused, unless it is null. A field that has no effect "
        "causes a warning in the log and in the header `X-Longshore-Warning`. A field that is "
        "refused is ignored if it has one of the values after «Accepted», which ask for nothing.",
        *(
            "",
            "## Routes",
            "",
            "| route | defined by | kinds of models | what it does |",
            "| --- | --- | --- | --- |",
        ),
        *_routes(),
        "",
        "Each route below `/v1/` is also below `/openai/v1/`.",
        *("", "## Headers", "", "| header | defined by | what it is |", "| --- | --- | --- |"),
        *(f"| `{name}` | {owner} | {what} |" for name, owner, what in _HEADERS),
        "",
        "## AWS's container standards",
        "",
        "The package model-hosting-container-standards 0.1.16 gives these features to AWS's "
        "containers. [handlers.md](../handlers.md#hooks) explains the hooks.",
        *("", "| in AWS's containers | here |", "| --- | --- |"),
        *(f"| {there} | {here} |" for there, here in _STANDARDS),
        "",
        "## Answers",
        "",
        "The answers of chat completions and completions:",
        *("", "| what | vLLM | here |", "| --- | --- | --- |"),
        *(f"| {what} | {there} | {here} |" for what, there, here in _ANSWERS),
        "",
        "The answers of `/invocations` to `inputs`:",
        *("", "| what | LMI | here |", "| --- | --- | --- |"),
        *(f"| {what} | {there} | {here} |" for what, there, here in _LMI_ANSWERS),
        *(line for title, fields in BODIES.items() for line in _table(title, fields)),
    ]


def _routes() -> Iterator[str]:
    """Yield a row for each route, with the kinds of models that have it."""
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
