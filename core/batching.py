"""Which strategy the options ask for, and why."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigurationError
from core.options import Batching, Options


@dataclass(frozen=True, slots=True)
class Choice:
    """The strategy asked for; `name` is None where nothing was said."""

    name: Batching | None
    reason: str


def choose_batching(options: Options) -> Choice:
    """`option.batching`, or what LMI's own keys imply.

    Raises ConfigurationError for a strategy that `option.executor` cannot follow.
    """
    choice = _implied(options)
    if options.executor == "library" and choice.name in ("continuous", "paged"):
        raise ConfigurationError(
            f"{choice.reason} chooses {choice.name}, which option.executor=library cannot follow; "
            "it works with none and dynamic"
        )
    return choice


def _implied(options: Options) -> Choice:
    if options.batching is not None:
        return Choice(options.batching, f"option.batching={options.batching}")
    if options.batch_size is not None and options.batch_size > 1:
        return _dynamic(options)
    rolling = options.rolling_batch
    if rolling is None:
        return _unsaid(options)
    if rolling == "disable":
        return Choice("none", "option.rolling_batch=disable and no batch_size above 1")
    if rolling == "scheduler":
        return Choice("continuous", "option.rolling_batch=scheduler")
    if options.paged_attention is False:
        return Choice(
            "continuous", f"option.rolling_batch={rolling} and option.paged_attention=false"
        )
    return Choice("paged", f"option.rolling_batch={rolling}")


def _dynamic(options: Options) -> Choice:
    overruled = options.rolling_batch not in (None, "disable")
    note = f", which overrules option.rolling_batch={options.rolling_batch} as in LMI"
    return Choice("dynamic", f"batch_size={options.batch_size}{note if overruled else ''}")


def _unsaid(options: Options) -> Choice:
    if options.paged_attention is False:
        return Choice("continuous", "option.paged_attention=false")
    if options.paged_attention:
        return Choice("paged", "option.paged_attention=true")
    return Choice(None, "nothing said: paged for a decoder, dynamic for any other model")
