"""Classification heads that adapters bring with them: modules that PEFT saves whole.

PEFT's `modules_to_save` names them; `task_type=SEQ_CLS` adds the classifier to it. Each text of a
batch gets the head of its own adapter. The model's tensors stay in use where an adapter has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.func import functional_call

from core.adapter import adapter_of
from core.part import Part


class Heads:
    """The modules of a classifier outside its body, for the adapters of a batch's texts."""

    def __init__(
        self, model: nn.Module, body: nn.Module, parts: Callable[[], Sequence[tuple[Part, ...]]]
    ) -> None:
        """Wrap the modules in place. parts: returns those of each text of the running batch."""
        self.parts = parts
        self.by_slot: dict[int, Mapping[str, Tensor]] = {}
        self.own: dict[str, Tensor] = {}
        """The model's own tensors, by name."""
        for name, module in list(model.named_children()):
            tensors = {} if module is body else dict(module.named_parameters(prefix=name))
            if tensors:
                self.own |= tensors
                setattr(model, name, _Head(module, f"{name}.", self))

    def write(self, slot: int, head: Mapping[str, Tensor]) -> None:
        """Replace the tensors of a slot by an adapter's, which may have none."""
        self.by_slot[slot] = head


class _Head(nn.Module):
    def __init__(self, module: nn.Module, prefix: str, heads: Heads) -> None:
        super().__init__()
        self._module = module
        self._prefix = prefix
        self._heads = heads

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the module's output for hidden states [texts, ...], by each text's adapter."""
        output = self._module(hidden, *args, **kwargs)
        adapters = [adapter_of(parts) for parts in self._heads.parts()]
        slots = [-1 if adapter is None else adapter.slot for adapter in adapters]
        for slot in set(slots):
            given = self._heads.by_slot.get(slot, {})
            tensors = {
                name.removeprefix(self._prefix): tensor
                for name, tensor in given.items()
                if name.startswith(self._prefix)
            }
            if tensors:
                at = [text for text, used in enumerate(slots) if used == slot]
                output[at] = functional_call(self._module, tensors, (hidden[at], *args), kwargs)
        return output
