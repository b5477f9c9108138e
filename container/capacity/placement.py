"""How the GPUs of an instance hold a decoder: its copies, and the part of it on each GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from container.capacity.architecture import states
from container.capacity.decoder import DTYPE_BYTES, Decoder, Draft
from container.capacity.instances import Instance
from core.configuration.kv_layout import LayerShape, even_divisions
from core.configuration.layout import Layout, lay_out
from core.configuration.options import MemoryOptions, Options
from core.configuration.sizing import most_swap_bytes
from core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Placement:
    """A decoder on an instance."""

    layout: Layout
    part: Decoder
    """The sizes of the largest part of the decoder that a GPU holds."""

    @property
    def num_gpus(self) -> int:
        """GPUs that the model uses."""
        return self.layout.num_copies * self.layout.num_local_ranks

    @property
    def of_each(self) -> str:
        """Says of a number that it applies to each copy, if there are several."""
        return " of each copy" if self.layout.num_copies > 1 else ""

    @property
    def is_divided(self) -> bool:
        """Whether several GPUs share the decoder."""
        return self.layout.num_ranks > 1

    def swap_bytes(self, memory: MemoryOptions) -> int:
        """The most bytes of the host's memory that a rank's swapped blocks get."""
        return most_swap_bytes(memory) // self.layout.num_local_ranks

    def lines(self) -> Iterator[str]:
        """Yield a line for each copy, if there are several."""
        return self.layout.lines() if self.layout.num_copies > 1 else iter(())

    def advice(self) -> str:
        """Return how the decoder could be divided further; '' if it cannot."""
        layout = self.layout
        most = len(layout.gpus) // layout.num_copies
        if layout.num_local_ranks == most:
            return ""
        return (
            f"; option.tensor_parallel_degree={most * layout.num_nodes} splits the model over the "
            "instance's GPUs"
        )


def place(decoder: Decoder, instance: Instance, options: Options) -> Placement:
    """Return how the instance's GPUs hold the decoder.

    Logits are gathered, so each part has the whole vocabulary.

    Raises what `lay_out` and `states` raise, and ConfigurationError if ranks cannot divide the
    heads.
    """
    gpus = [str(number) for number in range(instance.num_gpus)]
    layout = lay_out(options, gpus, num_cores=1, place=instance.name)
    ranks = layout.num_ranks
    if decoder.num_heads < ranks:
        raise ConfigurationError(
            f"option.tensor_parallel_degree={ranks}: {decoder.name} has {decoder.num_heads} "
            "attention heads"
        )
    fitting = even_divisions(decoder.num_heads, (shape.num_kv_heads for shape in decoder.shapes))
    if ranks not in fitting:
        raise ConfigurationError(
            f"option.tensor_parallel_degree={ranks}: {decoder.name} has layers with different "
            "numbers of KV heads, which these ranks cannot divide in the same proportion; set it "
            f"to one of {', '.join(str(n) for n in fitting if decoder.num_heads % n == 0)}"
        )
    part = replace(
        decoder,
        num_heads=-(-decoder.num_heads // ranks),
        num_kv_heads=-(-decoder.num_kv_heads // ranks),
        shapes=_divided(decoder.shapes, ranks),
        unfreed_shapes=_divided(decoder.unfreed_shapes, ranks),
        activations=tuple(width.share(ranks) for width in decoder.activations),
        linears=decoder.linears.share(ranks),
        num_parameters=-(-decoder.num_parameters // ranks),
        weights_bytes=-(-decoder.weights_bytes // ranks),
        states=states(decoder.settings, ranks),
        draft=_with_ends(decoder, ranks),
    )
    return Placement(layout, part)


def _with_ends(decoder: Decoder, num_ranks: int) -> Draft | None:
    """Return what drafts beside the first part of a decoder.

    A head computes alone, so it has a whole embedding and output projection there.
    """
    draft = decoder.draft
    if draft is None or not draft.state_bytes or num_ranks == 1:
        return draft
    count = 1 if decoder.settings.get("tie_word_embeddings") else 2
    size = decoder.vocab_size * decoder.hidden_size * DTYPE_BYTES[decoder.dtype]
    return replace(draft, weights_bytes=draft.weights_bytes + count * size)


def _divided(shapes: tuple[LayerShape, ...], num_ranks: int) -> tuple[LayerShape, ...]:
    """Return what a rank keeps. Each has all of a latent, or a whole KV head at least."""
    return tuple(
        replace(shape, num_kv_heads=-(-shape.num_kv_heads // num_ranks)) for shape in shapes
    )
