"""What both builders share: the first steps, and the tokens that end an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence as Steps
from itertools import count, islice
from typing import Any

from core.configuration.kv_layout import CacheGroup
from core.errors import ConfigurationError, LongshoreError
from core.foreign_code import contained, reason_of
from core.part import Feature
from core.plan import BlockMoves, BlockTable, Chunk, StepPlan
from core.sampling import SamplingParams
from core.sequence import Sequence
from engine.executor import Executor
from engine.loading.model_source import ModelSource
from engine.sampling.allowed import Allowed
from engine.sampling.edits import Edits
from engine.sampling.grammar import Grammar
from engine.sampling.grammars import Grammars
from engine.sampling.ngrams import NgramLimits
from engine.sampling.penalties import Penalties
from engine.sampling.rows import Stage
from engine.scores.part import PromptScores
from strategies.beam_group import BeamSearches

BITS = "the last bits of an answer may depend on its batch"
BITS_OF_TRANSFORMERS = f"{BITS}: transformers' code computes this model"
"""Notes for CPUs on exceptions to the promise of docs/same-bits.md."""


def prompt_step(groups: Steps[CacheGroup]) -> StepPlan:
    """Return a step that computes a prompt of two tokens."""
    return _step(0, 2, groups, BlockMoves())


def decode_step(groups: Steps[CacheGroup], moves: BlockMoves) -> StepPlan:
    """Return a step that moves blocks and computes the second of two tokens."""
    return _step(1, 1, groups, moves)


def _step(start: int, length: int, groups: Steps[CacheGroup], moves: BlockMoves) -> StepPlan:
    params = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=1, seed=0)
    blocks = count()
    tables = tuple(BlockTable(tuple(islice(blocks, group.blocks_for(2)))) for group in groups)
    chunk = Chunk(Sequence(0, [0, 0], params), start, length, tables, samples_token=True)
    return StepPlan((chunk,), moves)


def check_steps(executor: Executor, plans: Steps[StepPlan]) -> None:
    """Run the steps one after the other.

    So a model that cannot run fails at start, and on CUDA no request waits for a kernel to compile.
    """
    try:
        for plan in plans:
            with contained:
                executor.submit(plan, lambda: None).wait()
    except LongshoreError:  # its message is complete
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the model was loaded but cannot answer: {reason_of(error)}"
        ) from error


def eos_token_ids(source: ModelSource) -> tuple[int, ...]:
    """Return the tokens that end an answer, as generation_config.json or config.json says.

    Raises ConfigurationError if the former cannot be read.
    """
    path = source.model_dir / "generation_config.json"
    if path.is_file():
        try:
            eos = json.loads(path.read_bytes()).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:  # no JSON, or no object
            raise ConfigurationError(f"{path} cannot be read: {error}") from error
    else:
        eos = source.config.get_text_config().eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def sampling_stages(grammars: Grammars, *, with_prompt: bool = True) -> list[Stage[Any]]:
    """Return the stages in the order in which they apply.

    with_prompt: `no_repeat_ngram_size` also covers the prompt. False if an encoder reads it.
    """
    return [Allowed(), Edits(with_prompt=with_prompt), Penalties(), Grammar(grammars)]


def text_features(grammars: Grammars) -> tuple[Feature, ...]:
    """Return the features that every engine has."""
    return (PromptScores(), grammars, NgramLimits(), BeamSearches())
