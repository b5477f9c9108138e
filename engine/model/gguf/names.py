"""The names of a GGUF file's tensors in transformers' modules."""

from __future__ import annotations

from engine.model.families import FAMILIES, Family
from engine.model.gguf.architectures import OUTSIDE_LAYERS, Architecture, Settings
from engine.model.gguf.metadata import Metadata, Tensor
from engine.model.gguf.packed import PACKED
from engine.model.gguf.stored import StoredTensor, can_unpack

EMBEDDING, HEAD = "token_embd", "output"


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

    def tensors(self) -> list[StoredTensor]:
        """Return all tensors. Raises ConfigurationError for unknown names and types.

        A packed embedding that is the head, too, is listed twice: as the embedding, which is
        unpacked, and as a head of its own, which is not.
        """
        given = self._metadata.tensors.items()
        found = [self._stored(name, tensor) for name, tensor in given if name not in OUTSIDE_LAYERS]
        embedding = self._metadata.tensors[f"{EMBEDDING}.weight"]
        if f"{HEAD}.weight" not in self._metadata.tensors and embedding.type in PACKED:
            found.append(self._stored(f"{HEAD}.weight", embedding))
        return found

    def _stored(self, name: str, tensor: Tensor) -> StoredTensor:
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
        is_weight = suffix == "weight"
        is_matrix = is_weight and len(tensor.shape) == 2 and part != EMBEDDING
        return StoredTensor(
            f"{own}.{suffix}",
            tensor.file.name,
            tensor.type,
            tensor.offset,
            tensor.shape,
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
        "ffn_down": f"{mlp}.{family.down}",
    }
    queries = ("attn_q", "attn_k", "attn_v") if len(family.qkv) > 1 else ("attn_qkv",)
    names |= {key: f"{attention}.{own}" for key, own in zip(queries, family.qkv, strict=True)}
    gates = ("ffn_gate", "ffn_up") if len(family.gate_up) > 1 else ("ffn_up",)
    names |= {key: f"{mlp}.{own}" for key, own in zip(gates, family.gate_up, strict=True)}
    if family.qk_norm:
        norms = zip(("attn_q_norm", "attn_k_norm"), family.qk_norm_names, strict=True)
        names |= {key: f"{attention}.{own}" for key, own in norms}
    return {key: own for key, own in names.items() if own}
