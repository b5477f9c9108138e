"""Where the model's files lie: beside serving.properties, at a path, or on the Hugging Face hub."""

from __future__ import annotations

import logging
from pathlib import Path

from container.configuration import Configuration
from core.errors import ConfigurationError
from core.options import Options
from core.text.tokenizer import tokenizer_file

logger = logging.getLogger(__name__)

SAGEMAKER_MODEL_DIR = Path("/opt/ml/model")
_NOT_NEEDED = ("*.gguf", "*.onnx", "onnx/*", "*.msgpack", "*.h5", "*.ot", "*.pth", "original/*")


def default_model_dir() -> Path:
    """SageMaker's directory in a container; the demo model of the checkout elsewhere."""
    if SAGEMAKER_MODEL_DIR.is_dir():
        return SAGEMAKER_MODEL_DIR
    return Path(__file__).parents[1] / "models" / "demo"


def resolve_model_dir(configuration: Configuration, model_dir: Path) -> Path:
    """The local directory of the model; downloads a Hugging Face id.

    Raises ConfigurationError where no model is there, with the ways to name one.
    """
    model_id = configuration.options.model_id
    if model_id is None:
        return _require_model(
            model_dir, "put a model there, or name one with option.model_id, HF_MODEL_ID or "
            "--model-dir",
        )  # fmt: skip
    local = named_path(configuration, model_dir)
    if local.is_dir():
        if configuration.options.revision:
            logger.warning("option.revision has no effect on the local model %s", local)
        return _require_model(local.resolve(), "correct option.model_id")
    return _downloaded(model_id, configuration.options, local)


def named_path(configuration: Configuration, model_dir: Path) -> Path:
    """The model directory, or what option.model_id is if it is a path: relative to its file."""
    model_id = configuration.options.model_id
    if model_id is None:
        return model_dir
    beside = configuration.properties_path.parent if configuration.properties_path else Path()
    return beside / Path(model_id).expanduser()


def describe_model(configuration: Configuration, model_dir: Path) -> str:
    """Which model would be served, and what is wrong with it as far as a look shows."""
    path, model_id = named_path(configuration, model_dir), configuration.options.model_id
    if path.is_dir():
        lacks = "" if (path / "config.json").is_file() else " (no config.json: holds no model)"
        return f"{path.resolve()}{lacks}"
    return f"{model_id} (no directory here)" if model_id else f"{path} (there is no such directory)"


def _require_model(path: Path, cure: str) -> Path:
    if not (path / "config.json").is_file():
        raise ConfigurationError(f"{path} holds no model (config.json is missing): {cure}")
    tokenizer_file(path)
    return path


def _downloaded(model_id: str, options: Options, local: Path) -> Path:
    if "://" in model_id:
        raise ConfigurationError(
            f"option.model_id={model_id}: only directories and Hugging Face ids are served; on "
            "SageMaker let ModelDataUrl or S3DataSource put the files into /opt/ml/model"
        )
    if model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1:
        raise ConfigurationError(f"option.model_id={model_id}: there is no directory {local}")
    try:
        return _snapshot(model_id, options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(
            f"option.model_id={model_id}: neither a directory ({local}) nor to be had from the "
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
    return _require_model(path, "choose another model or option.revision")
