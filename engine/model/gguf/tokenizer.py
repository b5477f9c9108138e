"""The tokenizer of a GGUF file, as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from engine.model.gguf.metadata import Metadata

KEY = "tokenizer.ggml."
GPT2_SPLITS = {"gpt-2", "olmo", "mpt", "jais", "phi-2", "gigachat", "a.x-4.0", "mellum", "trillion"}
"""Values of tokenizer.ggml.pre with GPT-2's rules for splitting text."""
DIGIT_SPLITS = {
    "refact", "starcoder", "command-r", "smollm", "codeshell", "exaone", "minerva-7b",
}  # fmt: skip
"""Those that take each digit for itself first."""
WHOLE_WORDS = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "tekken",
}  # fmt: skip
"""Those that add the token of the beginning even if the file does not say so, and take whole words
before they merge parts."""
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
    "<end_of_turn>", "<eos>", "</s>", "<|return|>", "<|call|>", "<EOT>", "[EOT]",
}  # fmt: skip
"""Texts of tokens that end an answer, as for llama.cpp, whether or not the file says so."""
HARMONY, PART_END = {"<|return|>", "<|call|>"}, "<|end|>"
"""Of gpt-oss's tokens, only the first two end an answer; the last one ends a part of it."""


class TokenizerOf:
    """Reads the tokenizer of one file. All methods raise ConfigurationError if it is unknown."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._tokens: list[str] = metadata.required(f"{KEY}tokens")
        self._kind: str = metadata.required(f"{KEY}model")
        self._split: str = metadata.get(f"{KEY}pre", "")

    def write(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        text = self._backend().to_str()
        (directory / "tokenizer.json").write_text(json.dumps(self._mended(json.loads(text))))
        (directory / "tokenizer_config.json").write_text(json.dumps(self._config()))

    def end_ids(self) -> list[int]:
        """Return the ids of the tokens that end an answer."""
        named = {self._metadata.get(f"{KEY}{name}") for name in END_IDS} - {None}
        found = {index for index, token in enumerate(self._tokens) if token in ENDS}
        ends = named | found
        texts = {self._tokens[index] for index in ends}
        dropped = PART_END if texts >= HARMONY else ""
        return sorted(index for index in ends if self._tokens[index] != dropped)

    def _backend(self) -> tokenizers.Tokenizer:
        from transformers.integrations.gguf import gguf_tokenizer_mapping

        names = {
            "model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens",
            "scores": "scores", "token_type": "token_type", "merges": "merges",
        }  # fmt: skip
        values = {own: self._metadata.get(f"{KEY}{name}") for name, own in names.items()}
        given = {own: value for own, value in values.items() if value is not None}
        try:
            backend, _ = gguf_tokenizer_mapping.convert_gguf_tokenizer(
                self._metadata.architecture, given
            )
        except (ValueError, KeyError) as error:
            raise self._unknown(f"{KEY}model={self._kind}: {error}") from error
        self._set_split(backend)
        self._add_ends(backend)
        return backend

    def _set_split(self, backend: Any) -> None:
        if self._kind == "llama":
            if not self._metadata.get(f"{KEY}add_space_prefix", True):
                backend.normalizer = None  # which adds the space in some architectures
                backend.decoder = decoders.Sequence(
                    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
                )
                backend.pre_tokenizer = pre_tokenizers.Metaspace(
                    replacement="▁", prepend_scheme="never", split=False
                )
            return
        if self._kind != "gpt2" or self._split in GPT2_SPLITS:
            return
        if self._split in DIGIT_SPLITS:
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
            return
        from transformers.integrations.gguf import gguf_tokenizer_mapping

        if self._split not in getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", {}):
            raise self._unknown(f"{KEY}pre={self._split or '(missing)'}")

    def _add_ends(self, backend: Any) -> None:
        """Have it add the tokens of the beginning and the end, where the file says so."""
        is_default = self._kind == "llama" or self._split in WHOLE_WORDS
        before = self._added("bos", default=is_default)
        after = self._added("eos", default=False)
        names = [f"{before} " if before else "", "$A", f" {after}" if after else ""]
        single = "".join(names)
        backend.post_processor = TemplateProcessing(
            single=single,
            pair=f"{single} {single.replace('$A', '$B')}",
            special_tokens=[
                (token, self._tokens.index(token)) for token in {before, after} if token
            ],
        )

    def _added(self, name: str, *, default: bool) -> str:
        """Return the token that is added; "" for none."""
        token = self._special(name)
        return token or "" if self._metadata.get(f"{KEY}add_{name}_token", default) else ""

    def _mended(self, content: dict[str, Any]) -> dict[str, Any]:
        """Leave out the tokens that transformers' class adds though the file lacks them."""
        size = len(self._tokens)
        added = content["added_tokens"]
        content["added_tokens"] = [token for token in added if token["id"] < size]
        if self._split in WHOLE_WORDS:
            content["model"]["ignore_merges"] = True
        return content

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._metadata.required("{arch}.context_length"),
            "clean_up_tokenization_spaces": False,
        }
        config |= {key: self._special(name) for key, name in SPECIAL.items()}
        templates = self._templates()
        if templates:
            config["chat_template"] = templates
        return {key: value for key, value in config.items() if value is not None}

    def _templates(self) -> list[dict[str, str]]:
        main = self._metadata.get("tokenizer.chat_template")
        named = {"default": main} if main else {}
        for name in self._metadata.get("tokenizer.chat_templates", []):
            named[name] = self._metadata.required(f"tokenizer.chat_template.{name}")
        return [{"name": name, "template": template} for name, template in named.items()]

    def _special(self, name: str) -> str | None:
        index = self._metadata.get(f"{KEY}{name}_token_id")
        return None if index is None else self._tokens[index]

    def _unknown(self, problem: str) -> Exception:
        return self._metadata.error(
            f"{problem}: transformers {transformers.__version__} has no such tokenizer; put the "
            "model's tokenizer.json and tokenizer_config.json beside the file"
        )
