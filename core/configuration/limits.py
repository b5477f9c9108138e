"""The bounds on one request, in one table, from which docs/reference/limits.md is made.

A bound is checked before the work that it limits. Bounds that an option sets are fields of
`core.configuration.options.Options`; their rows here name the option.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import RequestError


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
    "Length of the request line",
    8190,
    "bytes",
    "This is the longest line that gunicorn accepts.",
    414,
)
HEADERS = Limit("Headers of a request", 100, "headers", "This is gunicorn's default.", 431)
HEADER_BYTES = Limit("Size of a header", 8190, "bytes", "This is gunicorn's default.", 431)
JSON_VALUES = Limit(
    "Values in a JSON body", 2**19, "JSON values", "It takes 0.1 µs to decode a value."
)
JSON_OBJECTS = Limit(
    "Lists and objects in a JSON body. The same limit applies to the keys",
    2**16,
    "JSON lists, objects and keys",
    "It takes up to 1 µs to decode one of them.",
)
JSON_DEPTH = Limit(
    "Nesting of a JSON body", 128, "levels", "Recursive code must not overflow the stack."
)
CSV_BYTES = Limit(
    "Size of a text/csv body. This limit does not apply to handlers",
    2**20,
    "bytes",
    "Python's CSV reader takes 40 ms for a body of this size.",
    413,
)
CSV_FIELD = Limit(
    "Length of a field of text/csv",
    2**17,
    "characters",
    "This is the longest field that Python's CSV reader accepts.",
)
FORM_PARTS = Limit("Parts of a form", 64, "parts", "Python code parses the parts, which is slow.")
FORM_TEXT = Limit(
    "Size of a text in a form", 2**18, "bytes", "The text is copied while it is decoded."
)
CHUNKS = Limit(
    "Chunks of a chunked body", 2**14, "chunks", "Even the smallest chunk takes 6 µs to read."
)
TEXT_CHARACTERS = Limit(
    "Length of a text. The limit is lower if `option.max_model_len` tokens cannot have so many "
    "characters",
    2**22,
    "characters",
    "A text is refused before it is tokenized, as tokenizing takes 1 µs for each character.",
)
INPUTS = Limit(
    "Inputs or prompts of a request", 1024, "inputs", "Each input becomes a request to the engine."
)
EMBEDDINGS = Limit(
    "Inputs of an embedding request", 2048, "inputs", "OpenAI's API has the same limit."
)
TASK_TEXT = Limit(
    "Length of a text for a task other than text generation",
    2**18,
    "characters",
    "The thread that runs the model tokenizes the text, which takes 1 µs for each character.",
)
TASK_TEXTS = Limit(
    "Total length of the texts of such a request. Rankings and scores count each pair of texts",
    2**22,
    "characters",
    "The thread that runs the model tokenizes the texts, which takes 1 µs for each character.",
)
LABELS = Limit(
    "Candidate labels, target words or labels to ignore in a request to a pipeline",
    1024,
    "labels",
    "The model reads each candidate label.",
)
LABELED_INPUTS = Limit(
    "Inputs of a request to a pipeline, multiplied by its candidate labels",
    2**13,
    "pairs of an input and a label",
    "The model reads each pair.",
)
WINDOWS = Limit(
    "Windows of the context of a question",
    1024,
    "windows",
    "The model reads each window. The windows of a context overlap.",
)
PAGE_CHARACTERS = Limit(
    "Total length of the words of a page",
    2**16,
    "characters",
    "The model reads the words of a page in windows, one after the other.",
)
IMAGES = Limit(
    "Images of an input or a conversation", 32, "images", "Each image is decoded in memory."
)
IMAGE_BYTES = Limit(
    "Size of an image in a conversation",
    20 * 2**20,
    "bytes",
    "The image is held in memory. OpenAI's API has the same limit.",
)
IMAGE_PIXELS = Limit(
    "Pixels of an image in a conversation",
    2**25,
    "pixels",
    "A file of a few kilobytes may decode to many pixels. An image of the maximum size takes 134 "
    "MB of memory.",
)
IMAGES_IN_USE = Limit(
    "Size of the images of all conversations that wait or run",
    2**32,
    "bytes of images",
    "The engine holds each image as the encoder's input in fp32, which takes 3 MB for each tile "
    "of 512 × 512 pixels.",
    503,
)
MESSAGES = Limit(
    "Messages of a conversation", 4096, "messages", "The chat template reads every message."
)
TOOLS = Limit("Tools of a conversation", 1024, "tools", "The chat template reads every tool.")
TOKEN_IDS = Limit(
    "Token ids in `tokens` of /detokenize", 2**18, "token ids", "It takes 0.5 µs to decode a token."
)
BAD_WORDS = Limit(
    "Words in `bad_words`",
    256,
    "words",
    "Each word is tokenized, and is compared with the answer in every step of the engine.",
)
BAD_WORDS_CHARACTERS = Limit(
    "Total length of the words in `bad_words`",
    2**16,
    "characters",
    "Tokenizing takes 1 µs for each character.",
)
LOGIT_BIAS = Limit(
    "Tokens in `logit_bias`", 1024, "tokens", "They are sent to the device in every step."
)
ALLOWED_TOKEN_IDS = Limit(
    "Token ids in `allowed_token_ids`",
    4096,
    "token ids",
    "They are sent to the device in every step.",
)
STOP_TOKEN_IDS = Limit(
    "Token ids in `stop_token_ids`", 1024, "token ids", "The engine keeps them for each answer."
)
STOP_STRINGS = Limit(
    "Stop strings", 16, "stop strings", "Each stop string is searched for after every token."
)
STOP_CHARACTERS = Limit(
    "Length of a stop string",
    1000,
    "characters",
    "Text that may be the start of a stop string is held back.",
)
GRAMMAR = Limit(
    "Length of a grammar. Schemas, regexes and choices are converted to grammars first",
    2**17,
    "characters",
    "For some grammars, llguidance takes time that grows with the square of the length: 0.1 s for "
    "this length, 19 s for eight times this length.",
)
GRAMMARS_IN_USE = Limit(
    "Total length of the grammars of all requests that wait or run",
    32 * GRAMMAR.maximum,
    "characters",
    "The engine holds the compiled grammars, which take up to 0.5 KB for each character.",
    503,
)
PROMPT_LOGPROBS = Limit(
    "Tokens of a prompt, multiplied by `prompt_logprobs` + 1",
    2**17,
    "logprobs of the prompt",
    "All logprobs of the prompt are one JSON document in memory.",
)
SOCKET_MESSAGES = Limit(
    "Messages of a WebSocket that wait while another message is answered",
    8,
    "messages",
    "The messages are held in memory. When the maximum is reached, the server reads no more from "
    "the WebSocket until it has taken one of them.",
    101,
)
SOCKET_IDLE = Limit(
    "Time for which a WebSocket may be idle, without a message, a ping or an answer",
    300,
    "s",
    "SageMaker sends a ping every 60 s, and itself gives up after five pings without an answer.",
    101,
)
UNREAD_BYTES = Limit(
    "Bytes of a response that the client has not read yet",
    2**18,
    "bytes",
    "This is the size of the socket's buffer. If the buffer stays full for "
    "`option.write_timeout`, the connection is closed and the request is aborted.",
    200,
)

LIMITS: tuple[Limit | OptionLimit, ...] = (
    OptionLimit(
        "Open connections of a front-end process",
        "max_connections",
        "connections",
        "To accept one more connection, the process closes the one that has been idle longest. If "
        "no connection is idle, the new one gets 503, except for a request to a health path.",
        503,
    ),
    REQUEST_LINE,
    HEADERS,
    HEADER_BYTES,
    OptionLimit(
        "Time within which the head of a request must arrive, counted from its first byte",
        "header_timeout",
        "s",
        "A slow client must not hold a connection.",
        408,
    ),
    OptionLimit(
        "Time within which a body must arrive",
        "body_timeout",
        "s",
        "A slow client must not hold memory.",
        408,
    ),
    OptionLimit("Size of a body", "max_request_size", "bytes", "The body is held in memory.", 413),
    OptionLimit(
        "Total size of the bodies that a front-end process holds",
        "max_body_memory",
        "bytes",
        "Many bodies at once must not fill the memory. A body that is the only one is always "
        "accepted.",
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
    TASK_TEXT,
    TASK_TEXTS,
    LABELS,
    LABELED_INPUTS,
    WINDOWS,
    PAGE_CHARACTERS,
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
        "Waiting requests",
        "job_queue_size",
        "requests",
        "Waiting requests take memory of the engine.",
        503,
    ),
    OptionLimit(
        "Prompt tokens of all waiting requests, each counted once per answer",
        "job_queue_tokens",
        "tokens",
        "Waiting requests take memory of the engine. If no request waits, a request of any size "
        "is accepted.",
        503,
    ),
    OptionLimit(
        "Time from the start of a request to its last token, including its time in the queue",
        "predict_timeout",
        "s",
        "By then, the client has usually given up.",
        424,
    ),
    UNREAD_BYTES,
    OptionLimit(
        "Time for which a client may leave the socket's buffer full",
        "write_timeout",
        "s",
        "The unfinished request holds memory of the engine.",
        200,
    ),
)
"""All bounds, in the order in which a request meets them."""
