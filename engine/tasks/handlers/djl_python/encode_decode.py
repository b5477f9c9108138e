"""Decode the content of a request by its Content-Type, as LMI does."""

from __future__ import annotations

from typing import Any

from engine.tasks.handlers.djl_python.inputs import Input


def decode(inputs: Input, content_type: str | None, key: str | None = None) -> Any:
    """Return decoded JSON; for any other content type, a dict with the content as `inputs`."""
    kind = content_type or "application/json"
    if kind.startswith("application/json"):
        return inputs.get_as_json(key)
    if kind.startswith("text/csv"):
        rows = inputs.get_as_csv(key)
        is_column = bool(rows) and "inputs" in rows[0]
        return {"inputs": [row["inputs"] for row in rows] if is_column else rows}
    if kind.startswith("text/plain"):
        return {"inputs": [inputs.get_as_string(key)]}
    if kind.startswith("image/"):
        return {"inputs": inputs.get_as_image(key)}
    return {"inputs": inputs.get_as_npz(key) if kind == "tensor/npz" else inputs.get_as_bytes(key)}
