"""The optional features, and the files outside the home of each that name it.

A reader of such a file must know the feature, although most requests do not use it. Code, comments
and docstrings count alike; `__init__.py` do not count, as they list what is in their folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.measures import tree


@dataclass(frozen=True)
class Feature:
    """Something that a request, a model or a machine may do without."""

    name: str
    words: str
    """A regular expression of what names it."""
    home: tuple[str, ...]
    """The files and folders that are its own, or those of another feature that is made of it."""
    homonyms: str = r"(?!)"
    """A regular expression of where such a word means something else."""
    other_files: tuple[str, ...] = ()
    """Files in which such words mean something else."""

    @cached_property
    def named_in(self) -> dict[str, int]:
        """How often each file outside the home names it, the most often first."""
        counts = {
            tree.name(path): self._count(path.read_text())
            for path in tree.files().values()
            if path.name != "__init__.py" and not self.is_home(path)
        }
        counts = {file: count for file, count in counts.items() if file not in self.other_files}
        return dict(sorted(((f, n) for f, n in counts.items() if n), key=lambda pair: -pair[1]))

    def _count(self, text: str) -> int:
        return len(re.findall(self.words, re.sub(self.homonyms, "", text)))

    def is_home(self, path: Path) -> bool:
        """Return whether a file is the feature's own."""
        return any(path.is_relative_to(tree.ROOT / place) for place in self.home)


_TASKS = (
    "engine/serve/task_service.py",
    "engine/tasks",
    "engine/offline/tasks.py",
    "container/apis/embeddings.py",
    "container/apis/tasks",
    "container/wire/reply.py",
    "core/configuration/pipeline_tasks.py",
    "core/configuration/task.py",
    "core/protocol/task_bodies.py",
)

_FEATURES = (
    Feature(
        "images",
        r"(?i)(?<![a-z])vision|image",
        (
            "engine/vision",
            "engine/loading/image_encoder.py",
            "core/images.py",
            "container/apis/generation/media.py",
            "container/isolation/media.py",
            *_TASKS,  # among them pipelines whose inputs are images
        ),
        # images of containers, and pipelines
        homonyms=r"AWS's (vLLM )?images?|[Ii]mages? (build|run)|the image(\n|, or)|tables, images",
    ),
    Feature(
        "adapters",
        r"(?i)adapter|(?<!kv_)(?<!q_)lora",
        (
            "engine/lora",
            "engine/offline/lora_request.py",
            "engine/serve/variant_service.py",
            "engine/tasks/variants.py",
            "core/adapter.py",
            "container/apis/adapter_routes.py",
            "container/apis/model_choice.py",
            "container/apis/named_model.py",
        ),
    ),
    Feature(
        "ranks",
        # not the rank of a text, a token or an adapter
        r"\b(\w+_)?ranks\b|_RANKS|rank[_ ]0|(?i:tensor_parallel)|\brank_(address|part)"
        r"|\b(an?|this|each|every|one|other|another|lost|the) rank\b|(of|one|local)_rank\b",
        (
            "engine/ranks",
            "engine/shard.py",
            "engine/builders/lead.py",
            "engine/follow.py",
            "container/capacity/placement.py",
            "core/configuration/layout.py",
        ),
        homonyms=r"ranks of all slots",
        other_files=("engine/sampling/ranking.py",),  # ranks of tokens
    ),
    Feature(
        "copies",
        # not copies of tensors, blocks or files
        r"num_copies|copies_serving|(options?|client)\.copies|\"copies\"|of_copy"
        r"|[cC]op(y|ies) of the (model|engine)|([Ff]urther|[Ee]ach|single|of a) cop(y|ies)\b"
        r"|\bcopy=(?!torch_|block_)|\bcopy: (int|str)|\[copy\](?! =)",
        (
            "container/capacity/placement.py",
            "container/wire/copies_client.py",
            "core/configuration/layout.py",
            "core/routing.py",
        ),
    ),
    Feature(
        "prompt_logprobs",
        r"(?i)prompt_?(logprobs|scores)|rows_to_score|scored_rows",
        ("engine/scores", "container/apis/scores.py"),
    ),
    Feature(
        "grammars",
        r"(?i)grammar|structured_?outputs|llguidance",
        (
            "engine/sampling/grammar.py",
            "engine/sampling/grammars.py",
            "engine/serve/grammar_compiler.py",
            "core/structured_outputs.py",
            "core/text/grammar.py",
            "core/text/grammar_matcher.py",
            "core/text/tools/notation.py",  # grammars of tool calls
            "container/apis/generation/structured_outputs.py",
            "container/isolation",
        ),
    ),
    Feature(
        "tasks",
        # The word alone is in many messages about a model.
        r"\bPerform\b(?! (a|the) )|\bPerformed\b|\bTask[A-Z]\w*|\.tasks\b|_task\b",
        _TASKS,
        homonyms=r"engine\.tasks\.handlers\.djl_python",
    ),
    Feature(
        "beams",
        r"(?i)beam",
        ("core/beams.py", "strategies/beam_group.py", "engine/step/beam_candidates.py"),
    ),
)

FEATURES = {feature.name: feature for feature in _FEATURES}
