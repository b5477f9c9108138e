"""What an advice and its score say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.advise.advice import Advice
from benchmarks.advise.estimate import Estimate, Outcome
from core.configuration.options import option_table
from engine.observers.store import Recording

MIB = 2**20


def table(rows: Mapping[str, Outcome | Estimate], block_bytes: int) -> Iterator[str]:
    """Yield a Markdown table. block_bytes: 0 if unknown."""
    unit, scale = ("MiB", block_bytes / MIB) if block_bytes else ("blocks", 1.0)
    yield f"| options | within the objective | requests/s within it | most KV {unit} |"
    yield "| --- | --- | --- | --- |"
    for name, row in rows.items():
        found = row if isinstance(row, Outcome) else row.outcome
        cells = [f"{found.share:.1%}", f"{found.per_s:.3g}", f"{found.most_blocks * scale:.3g}"]
        if isinstance(row, Estimate):
            share, per_s, blocks = row.share, row.per_s, row.most_blocks
            cells[0] += f" ({share.low:.0%} to {share.high:.0%})"
            cells[1] += f" ({per_s.low:.3g} to {per_s.high:.3g})"
            cells[2] += f" ({blocks.low * scale:.3g} to {blocks.high * scale:.3g})"
        yield f"| {name} | {' | '.join(cells)} |"


def recommendation(advice: Advice) -> Iterator[str]:
    """Yield the options to set."""
    best = advice.forecasts[0]
    if not best.changes:
        yield "No other options that were tried are better."
        return
    yield "The best options, for serving.properties:"
    for name, value in best.changes.items():
        text = str(value).lower() if isinstance(value, bool) else value
        yield f"    {option_table()[name].key}={text}"
    recorded = next(each for each in advice.forecasts if not each.changes)
    if best.estimate.share.low <= recorded.estimate.share.high:
        yield "The recorded options may do as well: the intervals overlap."


def unknowns(
    recording: Recording, advice: Advice, most_sequences: int, load: float
) -> Iterator[str]:
    """Yield what the forecasts leave out. most_sequences: of the recorded steps."""
    best = advice.forecasts[0]
    yield f"a machine that is more than {advice.uncertainty:.1%} faster or slower than it was"
    yield "HTTP and text: all times are the engine's"
    if advice.num_users is None:
        yield "what users would do with faster answers; here they send when they did (or --users)"
    if load != 1.0:
        yield f"whether {load:g} times the load is of the same kind"
    if best.most_sequences > most_sequences:
        yield (
            f"steps of more than {most_sequences} sequences, as none was recorded: their time is "
            f"extrapolated to {best.most_sequences}"
        )
    if "max_rolling_batch_prefill_tokens" in best.changes:
        yield "the memory of so large a step, which K and V may lack"
    if best.settings.batching != recording.header.settings.batching:
        yield "whether another strategy gets as many KV blocks"
    if best.settings.num_swap_blocks:
        yield "the time of swaps"
    if not recording.is_whole:
        yield "what was cached at first: the beginning of the recording was deleted"


def verdict(estimate: Estimate, found: Outcome) -> tuple[str, bool]:
    """Return whether what was recorded is in the intervals, in words, and of the first two."""
    held = {
        "share": found.share in estimate.share,
        "requests/s": found.per_s in estimate.per_s,
        "KV memory": found.most_blocks in estimate.most_blocks,
    }
    words = ", ".join(f"{name} {'yes' if is_in else 'NO'}" for name, is_in in held.items())
    return words, held["share"] and held["requests/s"]
