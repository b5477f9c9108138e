"""Times calls of one system that embeds texts.

Usage: `python calls.py SYSTEM MODEL WORK`. WORK: the JSON file of `benchmarks.embeddings`. Prints
the results as JSON. Another system's environment has none of this project's dependencies, so they
are imported only to measure our own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

Embed = Callable[[list[str]], list[list[float]]]
ONNX_FILE = "onnx/model.onnx"
NUM_COMPARED = 8
"""Texts whose vectors are compared with transformers'."""


@contextmanager
def run_longshore(model: str, dtype: str, device: str) -> Iterator[Embed]:
    from engine import LLM

    with LLM(model, device=device, dtype=dtype) as llm:
        yield lambda texts: [
            output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)
        ]


@contextmanager
def run_sentence_transformers(model: str, dtype: str, device: str) -> Iterator[Embed]:
    import torch
    from sentence_transformers import (  # pyright: ignore[reportMissingImports]
        SentenceTransformer,
    )

    kwargs = {"dtype": {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]}
    encoder: Any = SentenceTransformer(model, device=device, model_kwargs=kwargs)
    yield lambda texts: encoder.encode(texts, show_progress_bar=False).tolist()


@contextmanager
def run_infinity(model: str, dtype: str, device: str) -> Iterator[Embed]:
    import asyncio

    from infinity_emb import (  # pyright: ignore[reportMissingImports]
        AsyncEmbeddingEngine,
        EngineArgs,
    )

    arguments: Any = EngineArgs(
        model_name_or_path=model,
        engine="torch",
        device=device,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype],
        model_warmup=False,
    )
    engine: Any = AsyncEmbeddingEngine.from_args(arguments)
    with asyncio.Runner() as runner:
        runner.run(engine.astart())
        yield lambda texts: [
            vector.tolist() for vector in runner.run(engine.embed(sentences=texts))[0]
        ]
        runner.run(engine.astop())


@contextmanager
def run_fastembed(model: str, dtype: str, device: str) -> Iterator[Embed]:
    """It reads ONNX files, so torch exports the model first, into its folder."""
    from fastembed import TextEmbedding  # pyright: ignore[reportMissingImports]
    from fastembed.common.model_description import (  # pyright: ignore[reportMissingImports]
        ModelSource,
        PoolingType,
    )

    if not (Path(model) / ONNX_FILE).exists():
        _export(Path(model))
    is_cls = json.loads((Path(model) / "1_Pooling" / "config.json").read_text())
    name = "local/model"
    TextEmbedding.add_custom_model(
        name,
        PoolingType.CLS if is_cls["pooling_mode_cls_token"] else PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf=name),
        dim=json.loads((Path(model) / "config.json").read_text())["hidden_size"],
        model_file=ONNX_FILE,
    )
    threads = len(os.sched_getaffinity(0))  # by default, those of whole cores
    encoder: Any = TextEmbedding(name, threads=threads, specific_model_path=model)
    yield lambda texts: [vector.tolist() for vector in encoder.embed(texts)]


def _export(model: Path) -> None:
    import torch
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base: Any = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            return self.base(ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = torch.ones(2, 16, dtype=torch.long)
    file = model / ONNX_FILE
    file.parent.mkdir(exist_ok=True)
    torch.onnx.export(
        Hidden(),
        (example, example, torch.zeros_like(example)),
        file.with_suffix(".part"),
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes={name: {0: "texts", 1: "tokens"} for name in [*names, "last_hidden_state"]},
        dynamo=False,
    )
    file.with_suffix(".part").rename(file)


SYSTEMS: dict[str, Callable[[str, str, str], AbstractContextManager[Embed]]] = {
    "longshore": run_longshore,
    "sentence-transformers": run_sentence_transformers,
    "infinity-emb": run_infinity,
    "fastembed": run_fastembed,
}


def main(system: str, model: str, work_file: str) -> None:
    work = json.loads(Path(work_file).read_text())
    texts: list[str] = work["texts"]
    with SYSTEMS[system](model, work["dtype"], work["device"]) as embed:
        vectors = embed(texts[:NUM_COMPARED])  # warms up, too
        seconds = {size: _seconds(embed, texts, size, work["seconds"]) for size in work["at_once"]}
    print(json.dumps({"vectors": vectors, "seconds": seconds}))


def _seconds(embed: Embed, texts: list[str], size: int, seconds: float) -> list[float]:
    """Return the time of each call with `size` texts, for about so many seconds."""
    taken: list[float] = []
    at = 0
    while sum(taken) < seconds:
        batch = [texts[(at + index) % len(texts)] for index in range(size)]
        at += size
        started = time.perf_counter()
        embed(batch)
        taken.append(time.perf_counter() - started)
    return taken


if __name__ == "__main__":
    main(*sys.argv[1:])
