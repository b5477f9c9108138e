"""Models by their id on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from core.errors import ConfigurationError
from core.options import Options

_NOT_NEEDED = ("*.gguf", "*.onnx", "onnx/*", "*.msgpack", "*.h5", "*.ot", "*.pth", "original/*")


def from_hub(model_id: str, options: Options, *, given_as: str, local: Path) -> Path:
    """The local copy of a model, of which what is missing is downloaded.

    given_as: the setting that holds the id; local: the directory that it might have meant.

    Raises ConfigurationError where the hub has no such model, or is out of reach.
    """
    if "://" in model_id:
        raise ConfigurationError(
            f"{given_as}={model_id}: expected a path, an s3:// address or a Hugging Face id"
        )
    if model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1:
        raise ConfigurationError(f"{given_as}={model_id}: there is no directory {local}")
    try:
        return _snapshot(model_id, options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(
            f"{given_as}={model_id}: neither a directory ({local}) nor to be had from the "
            f"Hugging Face hub ({reason.rstrip('.')}): correct the id, set HF_TOKEN for a gated "
            "model, or use a directory where there is no network"
        ) from error


def _snapshot(model_id: str, options: Options) -> Path:
    import huggingface_hub  # half a second that only a download needs

    def fetch(unwanted: list[str]) -> Path:
        return Path(
            huggingface_hub.snapshot_download(  # pyright: ignore[reportUnknownMemberType]
                model_id, revision=options.revision, ignore_patterns=unwanted
            )
        )

    # Many repositories hold the weights twice; *.bin is wanted only where it is the only form.
    is_dummy = options.load_format == "dummy"
    path = fetch([*_NOT_NEEDED, "*.bin", *(["*.safetensors"] if is_dummy else [])])
    if not is_dummy and not any(path.glob("*.safetensors")):
        path = fetch(list(_NOT_NEEDED))
    return path
