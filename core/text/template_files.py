"""Loads a model's chat template and the special tokens that it uses."""

from __future__ import annotations

from pathlib import Path

import msgspec

from core.errors import ConfigurationError
from core.text.chat_template import ChatTemplate
from core.text.tools.response_template.template import ResponseTemplate, read_template


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _SpecialToken(msgspec.Struct):
    content: str


class _TokenizerConfig(msgspec.Struct):
    """The part of tokenizer_config.json, or special_tokens_map.json, that templates need."""

    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _SpecialToken | None = None
    eos_token: str | _SpecialToken | None = None
    unk_token: str | _SpecialToken | None = None
    sep_token: str | _SpecialToken | None = None
    pad_token: str | _SpecialToken | None = None
    cls_token: str | _SpecialToken | None = None
    mask_token: str | _SpecialToken | None = None
    response_template: object = None

    def special_tokens(self) -> dict[str, str]:
        given = {name: getattr(self, name) for name in self.__struct_fields__ if "_token" in name}
        tokens: dict[str, str | _SpecialToken | None] = given
        return {
            name: token if isinstance(token, str) else token.content
            for name, token in tokens.items()
            if token is not None
        }


def load_chat_template(model_dir: Path, override: str | None) -> ChatTemplate | None:
    """Load the chat template from the file `override`, or else the model's own.

    override: a path relative to the model's directory, or absolute. Returns None if there is no
    template. Raises ConfigurationError if a file cannot be used.
    """
    config = _read_config(model_dir / "tokenizer_config.json")
    tokens = _read_config(model_dir / "special_tokens_map.json").special_tokens()
    if override is None:
        origin, named = str(model_dir), _own_templates(model_dir, config)
    else:
        origin = f"option.chat_template={override}"
        named = {"default": _read_text(model_dir / override)}
    if "default" not in named:
        return None
    response = _response_template(model_dir, config)
    try:
        return ChatTemplate(
            named["default"],
            with_tools=named.get("tool_use", ""),
            special_tokens={**tokens, **config.special_tokens()},
            response=response,
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"{origin}: {error}") from None


def _response_template(model_dir: Path, config: _TokenizerConfig) -> ResponseTemplate | None:
    if config.response_template is None:
        return None
    try:
        return read_template(config.response_template)
    except ConfigurationError as error:
        raise ConfigurationError(f"{model_dir / 'tokenizer_config.json'}: {error}") from None


def _own_templates(model_dir: Path, config: _TokenizerConfig) -> dict[str, str]:
    """Return the model's templates by name. Files override entries of tokenizer_config.json.

    Before version 5, transformers saved the templates of a model that has a processor in
    chat_template.json.
    """
    of_processor = _read_config(model_dir / "chat_template.json").chat_template
    entry = of_processor or config.chat_template or []
    named = (
        {"default": entry}
        if isinstance(entry, str)
        else {template.name: template.template for template in entry}
    )
    for path in (model_dir / "additional_chat_templates").glob("*.jinja"):
        named[path.stem] = _read_text(path)
    main = model_dir / "chat_template.jinja"
    if main.is_file():
        named["default"] = _read_text(main)
    return named


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the chat template {path}: {error}") from None


def _read_config(path: Path) -> _TokenizerConfig:
    if not path.is_file():
        return _TokenizerConfig()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TokenizerConfig)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{path}: {error}") from None
