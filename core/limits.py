"""The bounds on one request, in one table, from which docs/limits.md is made.

A bound is checked before the work that it limits. Bounds that an option sets are fields of
`core.options.Options`; their rows here name the option.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import RequestError
from core.options import option_table


@dataclass(frozen=True, slots=True)
class Limit:
    """A fixed bound."""

    quantity: str
    maximum: int
    unit: str
    reason: str
    status: int = 400
    """HTTP status of a request beyond the bound."""

    def check(self, field: str, size: int) -> None:
        """Raise RequestError if `field` has more than the maximum."""
        if size > self.maximum:
            raise RequestError(
                field, f"has {size:,} {self.unit}; at most {self.maximum:,} are allowed"
            )


@dataclass(frozen=True, slots=True)
class OptionLimit:
    """A bound that an option sets."""

    quantity: str
    option: str
    """The name of the field of `Options`."""
    unit: str
    reason: str
    status: int


REQUEST_LINE = Limit(
    "Bytes of the request line", 8190, "bytes", "gunicorn's own; it reads no further.", 414
)
HEADERS = Limit("Headers of a request", 100, "headers", "gunicorn's own.", 431)
HEADER_BYTES = Limit("Bytes of a header", 8190, "bytes", "gunicorn's own.", 431)
JSON_VALUES = Limit(
    "Values of a JSON body", 2**19, "JSON values", "Decoding takes 0.1 µs for each."
)
JSON_OBJECTS = Limit(
    "Lists and objects of a JSON body, and keys",
    2**16,
    "JSON lists, objects and keys",
    "Decoding takes up to 1 µs for each.",
)
JSON_DEPTH = Limit(
    "Depth of a JSON body", 128, "levels", "Recursive code must not overflow the stack."
)
CSV_BYTES = Limit(
    "Bytes of a text/csv body, except for handlers",
    2**20,
    "bytes",
    "Python's CSV reader takes 40 ms for them.",
    413,
)
CSV_FIELD = Limit(
    "Characters of a field of text/csv", 2**17, "characters", "The limit of Python's CSV reader."
)
FORM_PARTS = Limit("Parts of a form", 64, "parts", "They are parsed in Python.")
FORM_TEXT = Limit("Bytes of a text in a form", 2**18, "bytes", "It is copied as it is decoded.")
CHUNKS = Limit("Chunks of a chunked body", 2**14, "chunks", "Each takes 6 µs, however small it is.")
TEXT_CHARACTERS = Limit(
    "Characters of a text, or the longest token times `option.max_model_len` if that is less",
    2**22,
    "characters",
    "Longer text has too many tokens. It is refused before it is tokenized, which takes 1 µs for "
    "each character.",
)
INPUTS = Limit(
    "Inputs or prompts of a request", 1024, "inputs", "Each one becomes a request to the engine."
)
EMBEDDINGS = Limit("Inputs of an embedding request", 2048, "inputs", "OpenAI's limit.")
IMAGES = Limit(
    "Images of an input or a conversation", 32, "images", "Each one is decoded in memory."
)
IMAGE_BYTES = Limit(
    "Bytes of an image in a conversation",
    20 * 2**20,
    "bytes",
    "It is held in memory. OpenAI's limit.",
)
IMAGE_PIXELS = Limit(
    "Pixels of an image in a conversation",
    2**25,
    "pixels",
    "A file of a few kilobytes may unpack to many; this is 134 MB in memory.",
)
IMAGES_IN_USE = Limit(
    "Bytes of the images of all conversations that wait or run",
    2**32,
    "bytes of images",
    "The engine holds them as the encoder takes them, in fp32: 3 MB for each tile of 512 × 512.",
    503,
)
MESSAGES = Limit("Messages of a conversation", 4096, "messages", "The chat template reads each.")
TOOLS = Limit("Tools of a conversation", 1024, "tools", "The chat template reads each.")
TOKEN_IDS = Limit("`tokens` of /detokenize", 2**18, "token ids", "Decoding takes 0.5 µs for each.")
BAD_WORDS = Limit(
    "`bad_words`", 256, "words", "Each one is tokenized, and compared in every step of the engine."
)
BAD_WORDS_CHARACTERS = Limit(
    "Characters of all `bad_words`", 2**16, "characters", "They are tokenized, 1 µs for each."
)
LOGIT_BIAS = Limit(
    "`logit_bias`", 1024, "tokens", "They are sent to the device in every step of the engine."
)
ALLOWED_TOKEN_IDS = Limit(
    "`allowed_token_ids`", 4096, "token ids", "They are sent to the device in every step."
)
STOP_TOKEN_IDS = Limit("`stop_token_ids`", 1024, "token ids", "They are kept for each answer.")
STOP_STRINGS = Limit(
    "Stop strings", 16, "stop strings", "Each one is searched for after every token."
)
STOP_CHARACTERS = Limit(
    "Characters of a stop string", 1000, "characters", "Text that may start it is held back."
)
GRAMMAR = Limit(
    "Characters of a grammar, given or made from a schema, a regex or choices",
    2**17,
    "characters",
    "llguidance takes quadratic time for some: 0.1 s here, 19 s for eight times that.",
)
GRAMMARS_IN_USE = Limit(
    "Characters of the grammars of all requests that wait or run",
    32 * GRAMMAR.maximum,
    "characters",
    "The engine holds them compiled: up to 0.5 KB for each character.",
    503,
)
PROMPT_LOGPROBS = Limit(
    "Tokens of a prompt times `prompt_logprobs` + 1",
    2**17,
    "logprobs of the prompt",
    "They are one JSON document in memory.",
)
SOCKET_MESSAGES = Limit(
    "Messages of a WebSocket that wait while another one is answered",
    8,
    "messages",
    "They are held in memory. The socket is not read until one of them is taken.",
    101,
)
SOCKET_IDLE = Limit(
    "Time for which a WebSocket may be idle: no message, no ping, no answer",
    300,
    "s",
    "SageMaker pings every 60 s, and gives up after five pings itself.",
    101,
)
UNREAD_BYTES = Limit(
    "Bytes of a response that its client has not read",
    2**18,
    "bytes",
    "The socket's buffer. When it is full and stays full for `option.write_timeout`, the "
    "connection is closed and the request aborted.",
    200,
)

LIMITS: tuple[Limit | OptionLimit, ...] = (
    OptionLimit(
        "Open connections of a front-end process",
        "max_connections",
        "connections",
        "The connection that is idle for longest is closed for a new one. If none is idle, the new "
        "one gets 503, unless it requests a health path.",
        503,
    ),
    REQUEST_LINE,
    HEADERS,
    HEADER_BYTES,
    OptionLimit(
        "Time for the head of a request to arrive, from its first byte",
        "header_timeout",
        "s",
        "A slow client must not hold a connection.",
        408,
    ),
    OptionLimit(
        "Time for a body to arrive",
        "body_timeout",
        "s",
        "A slow client must not hold memory.",
        408,
    ),
    OptionLimit("Bytes of a body", "max_request_size", "bytes", "It is held in memory.", 413),
    OptionLimit(
        "Bytes of the bodies of all requests that a front-end process holds",
        "max_body_memory",
        "bytes",
        "Many bodies at once must not fill the memory. A body is accepted if it is the only one.",
        503,
    ),
    CSV_BYTES,
    CSV_FIELD,
    FORM_PARTS,
    FORM_TEXT,
    CHUNKS,
    SOCKET_MESSAGES,
    SOCKET_IDLE,
    JSON_VALUES,
    JSON_OBJECTS,
    JSON_DEPTH,
    TEXT_CHARACTERS,
    INPUTS,
    EMBEDDINGS,
    IMAGES,
    IMAGE_BYTES,
    IMAGE_PIXELS,
    MESSAGES,
    TOOLS,
    TOKEN_IDS,
    BAD_WORDS,
    BAD_WORDS_CHARACTERS,
    LOGIT_BIAS,
    ALLOWED_TOKEN_IDS,
    STOP_TOKEN_IDS,
    STOP_STRINGS,
    STOP_CHARACTERS,
    GRAMMAR,
    PROMPT_LOGPROBS,
    GRAMMARS_IN_USE,
    IMAGES_IN_USE,
    OptionLimit(
        "Waiting requests", "job_queue_size", "requests", "They are held in the engine.", 503
    ),
    OptionLimit(
        "Prompt tokens of all waiting requests, each counted once per answer",
        "job_queue_tokens",
        "tokens",
        "They are held in the engine. A request is accepted whatever its size if none waits.",
        503,
    ),
    OptionLimit(
        "Time from the start of a request to its last token, in the queue too",
        "predict_timeout",
        "s",
        "Its client has given up by then.",
        424,
    ),
    UNREAD_BYTES,
    OptionLimit(
        "Time in which a client that reads nothing must read again",
        "write_timeout",
        "s",
        "Its request holds memory of the engine.",
        200,
    ),
)
"""All bounds, in the order in which a request meets them."""


def markdown_lines() -> list[str]:
    """Return docs/limits.md."""
    return [
        "# Limits",
        "",
        "The bounds on one request, so that none harms the others. "
        "Generated from `core/limits.py` by `make docs`.",
        "",
        "| what | default | option | status | why |",
        "| --- | --- | --- | --- | --- |",
        *map(_row, LIMITS),
        "",
        "Status 200: the response has begun, so it is cut off. With `option.overload_status=429` a "
        "full queue answers 429 instead of 503; both have `Retry-After`.",
        "",
        "Status 101: a bound of [WebSockets](requests.md#bidirectional-streams). A WebSocket that "
        "is idle for too long is closed with 1008, as is one whose message does not arrive in "
        "time. A message that is too large closes it with 1009.",
    ]


def _row(limit: Limit | OptionLimit) -> str:
    if isinstance(limit, Limit):
        size, key = f"{limit.maximum:,} {limit.unit}", ""
    else:
        option = option_table()[limit.option]
        size, key = f"{option.default:,} {limit.unit}", f"`{option.key}`"
    return f"| {limit.quantity} | {size} | {key} | {limit.status} | {limit.reason} |"
