"""The names of a GGUF file's tensors in transformers' modules."""

from __future__ import annotations

from collections.abc import Iterator

from engine.model.families import FAMILIES, ExpertNames, Family
from engine.model.gguf.architectures import OUTSIDE_LAYERS, Architecture, Settings
from engine.model.gguf.metadata import Metadata, Tensor
from engine.model.gguf.packed import PACKED
from engine.model.gguf.stored import StoredTensor, can_unpack, num_bytes

EMBEDDING, HEAD = "token_embd", "output"
SINKS = "attn_sinks"
EXPERT = "experts.*"
"""Stands for each expert in a name; a file has one tensor for all of them."""


class Naming:
    """Names the tensors of one file."""

    def __init__(self, metadata: Metadata, architecture: Architecture, settings: Settings) -> None:
        """settings: those of config.json."""
        self._metadata, self._settings = metadata, settings
        self._rotates_pairs = architecture.rotates_pairs
        self._family = family = FAMILIES[architecture.model_type]
        self._layers = f"{family.prefix}{family.layers}."
        self._outer = {
            EMBEDDING: f"{family.prefix}{family.embedding}",
            "output_norm": f"{family.prefix}{family.final_norm}",
            HEAD: family.head,
        }
        self._inner = _layer_names(family)
        for given, usual in architecture.renames:
            self._inner[given] = self._inner.pop(usual)

    def tensors(self) -> list[StoredTensor]:
        """Return all tensors. Raises ConfigurationError for unknown names and types.

        A packed embedding that is the head, too, is listed twice: as the embedding, which is
        unpacked, and as a head of its own, which is not. Experts are listed one by one.
        """
        given = self._metadata.tensors
        kept = [item for item in given.items() if item[0] not in OUTSIDE_LAYERS]
        embedding = given[f"{EMBEDDING}.weight"]
        if f"{HEAD}.weight" not in given and embedding.type in PACKED:
            kept.append((f"{HEAD}.weight", embedding))
        return [stored for name, tensor in kept for stored in self._stored(name, tensor)]

    def _stored(self, name: str, tensor: Tensor) -> Iterator[StoredTensor]:
        if not can_unpack(tensor.type):
            raise self._metadata.error(
                f"tensor '{name}' has the type {tensor.type}, which cannot be read; use a file "
                "with Q8_0, Q4_0, K-quants or 16 bits"
            )
        part, _, suffix = name.rpartition(".")
        own, layer = self._outer.get(part), None
        if part.startswith("blk."):
            _, index, part = part.split(".", 2)
            own, layer = self._inner.get(part), int(index)
            own = own and f"{self._layers}{index}.{own}"
        if own is None:
            raise self._metadata.error(
                f"tensor '{name}' belongs to no layer of {self._metadata.architecture}; serve the "
                "model's *.safetensors instead"
            )
        own = own if part == SINKS else f"{own}.{suffix}"
        names, shape = [own], tensor.shape
        if EXPERT in own:
            names = [own.replace("*", str(expert)) for expert in range(shape[0])]
            shape = shape[1:]
        is_weight = suffix == "weight"
        is_matrix = is_weight and len(shape) == 2 and part != EMBEDDING
        for index, own in enumerate(names):
            yield StoredTensor(
                own,
                tensor.file.name,
                tensor.type,
                tensor.offset + index * num_bytes(shape, tensor.type),
                shape,
                layer,
                self._num_pairs(part),
                self._family.norm.offset if is_weight and part.endswith("norm") else 0.0,
                is_packed=is_matrix and tensor.type in PACKED,
            )

    def _num_pairs(self, part: str) -> int:
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        is_rotated = self._rotates_pairs and part in heads
        return self._settings[heads[part]] if is_rotated else 0


def _layer_names(family: Family) -> dict[str, str]:
    """Return the names in a layer of the family, by those in a layer of a GGUF file."""
    before, after, before_mlp, after_mlp = family.norms
    attention, mlp = family.attention, family.mlp
    names = {
        "attn_norm": before,
        "post_attention_norm": after,
        "ffn_norm": before_mlp,
        "post_ffw_norm": after_mlp,
        "attn_output": f"{attention}.{family.out}",
        SINKS: f"{attention}.sinks",
    }
    queries = ("attn_q", "attn_k", "attn_v") if len(family.qkv) > 1 else ("attn_qkv",)
    names |= {key: f"{attention}.{own}" for key, own in zip(queries, family.qkv, strict=True)}
    if family.experts is not None:
        names |= _expert_names(family.experts)
    else:
        gates = ("ffn_gate", "ffn_up") if len(family.gate_up) > 1 else ("ffn_up",)
        names |= {key: f"{mlp}.{own}" for key, own in zip(gates, family.gate_up, strict=True)}
        names["ffn_down"] = f"{mlp}.{family.down}"
    if family.qk_norm:
        norms = zip(("attn_q_norm", "attn_k_norm"), family.qk_norm_names, strict=True)
        names |= {key: f"{attention}.{own}" for key, own in norms}
    return {key: own for key, own in names.items() if own}


def _expert_names(experts: ExpertNames) -> dict[str, str]:
    parts = {"gate": experts.gate, "up": experts.up, "down": experts.down}
    names = {f"ffn_{part}_exps": f"{experts.block}.{EXPERT}.{own}" for part, own in parts.items()}
    return names | {"ffn_gate_inp": f"{experts.block}.{experts.router}"}
