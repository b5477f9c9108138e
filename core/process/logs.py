"""The log of a process: lines of text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
JSON_START = '{"time":'
"""The beginning of every line of a JSON log."""
_FIELDS = "fields"
Value = str | int | float | None


def configure_logs(log_format: Literal["text", "json"], level: str, model: str = "") -> None:
    """Send this process's log to stderr.

    model: the model's name, for every line of a JSON log. If empty, the lines have no such field.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(model) if log_format == "json" else logging.Formatter(TEXT_FORMAT)
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])


def log_event(logger: logging.Logger, event: str, **fields: Value) -> None:
    """Log an event as key=value, or as fields of the JSON object. Omits fields that are None."""
    given = {name: value for name, value in fields.items() if value is not None}
    text = " ".join([f"event={event}", *(f"{name}={_text(given[name])}" for name in given)])
    logger.info("%s", text, extra={_FIELDS: {"event": event, **given}})


def _text(value: Value) -> str:
    if (isinstance(value, str) and not value.isprintable()) or " " in str(value):
        return json.dumps(value)
    return str(value)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, and message or fields."""

    def __init__(self, model: str = "") -> None:
        super().__init__()
        self._common = {"model": model} if model else {}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a newline at its end."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time,
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._common,
            **getattr(record, _FIELDS, {"message": record.getMessage()}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"), default=str)


def writes_json() -> bool:
    """Whether this process writes a JSON log."""
    return any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers)
