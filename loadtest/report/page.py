"""Puts text, tables and charts into one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec
import vl_convert
from markupsafe import Markup

from loadtest.report import charts, tables, verdict
from loadtest.report.charts import Spec
from loadtest.report.gantt import NUM_SHOWN, gantt
from loadtest.report.style import CONFIG, duration, number
from loadtest.report.tables import Table
from loadtest.results import Results, Run
from loadtest.slo import value_of
from loadtest.workloads import WORKLOADS

PICTURE_SCALE = 2
SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"


class Figure(NamedTuple):
    """A chart with what it shows."""

    title: str
    text: str
    spec: Spec


class Section(NamedTuple):
    """One workload."""

    title: str
    text: str
    order: str | None
    tables: Sequence[tuple[str, Table]]
    figures: Sequence[Figure]


def write_report(results: Results, folder: Path) -> Path:
    """Writes report.html; returns its path."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["json"] = _json
    page = environment.get_template("page.html").render(
        headline=_headline(results),
        results=results,
        remarks=[*results.notes, *verdict.remarks(results.runs)],
        answer=tables.objectives(results) if results.slo else tables.answer(results.runs),
        overview=None if results.slo else _themed(charts.bars(results.runs)),
        sections=[_objectives(results)] if results.slo else _sections(results.runs),
        settings=tables.settings(results),
        library=_library(),
        themed=_themed,
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def write_pictures(results: Results, folder: Path) -> list[Path]:
    """Writes every chart as a PNG, for documents and slides; returns their paths."""
    figures = {"overview": charts.bars(results.runs)} if not results.slo else {}
    sections = [_objectives(results)] if results.slo else _sections(results.runs)
    for section in sections:
        for figure in section.figures:
            figures[f"{section.title} {figure.title}".lower().replace(" ", "-")] = figure.spec
    paths = []
    for name, spec in figures.items():
        spec = {**_themed(spec), "background": "white", "padding": 12}
        paths.append(folder / f"{name}.png")
        paths[-1].write_bytes(vl_convert.vegalite_to_png(spec, scale=PICTURE_SCALE))
    return paths


def _headline(results: Results) -> str:
    if not results.slo:
        return verdict.headline(results.runs)
    table = tables.objectives(results)
    best = table.rows[table.best[0]]
    return f"{best[0]} sustains {best[1]} requests/s"


def _sections(runs: Sequence[Run]) -> list[Section]:
    names = dict.fromkeys(run.workload for run in runs)
    return [_section([run for run in runs if run.workload == name]) for name in names]


def _section(runs: Sequence[Run]) -> Section:
    figures = [
        Figure(
            "How long clients wait",
            "Each curve says which share of requests, or of gaps between tokens, took at most so "
            "long. Further left is better.",
            charts.latencies(runs),
        )
    ]
    if any(sample.metrics for run in runs for sample in run.samples):
        figures.append(
            Figure(
                "How full the server is",
                "Above, sequences in the batch. Below, the share of KV memory that is held, and "
                "within it what is filled with tokens: the light area is reserved and "
                "empty. Time runs on its own scale in each column.",
                charts.timelines(runs),
            )
        )
    picture = gantt(runs)
    if picture is not None:
        figures.append(
            Figure(
                f"The first {NUM_SHOWN} requests",
                "A row for each request in order of arrival, all on the same time. Padding is a "
                "place in a gang whose request has ended, and which nobody may take until the "
                "gang's last one has.",
                picture,
            )
        )
    first = runs[0]
    return Section(
        first.workload,
        _description(runs),
        verdict.order(runs),
        [("What clients see", tables.outside(runs)), ("Why", tables.inside(runs))],
        figures,
    )


def _description(runs: Sequence[Run]) -> str:
    first = runs[0]
    doc = WORKLOADS[first.workload].doc if first.workload in WORKLOADS else ""
    measures = first.measures
    scale = "" if first.length_scale == 1 else f" All lengths × {first.length_scale:g}."
    loop, counts = first.loop, sorted({len(run.records) for run in runs})
    if len({run.loop for run in runs}) > 1:  # a sweep's differ in the rate, which comes last
        loop = loop.rsplit(",", 1)[0]
    text = (
        f"{doc[:1].upper()}{doc[1:]}.{scale} {loop[:1].upper()}{loop[1:]}. "
        f"{' to '.join(map(str, counts[:1] + counts[1:][-1:]))} requests a run, on average "
        f"{number(measures.prompt_tokens)} tokens of prompt and {number(measures.output_tokens)} "
        "of answer, each to its last token."
    )
    if first.num_left_out:
        text += f" {first.num_left_out} that are too long for the server were left out."
    return text


def _objectives(results: Results) -> Section:
    runs = results.runs
    panels = [
        charts.rates(
            runs, f"{name}, limit {duration(limit)}", limit,
            [value_of(run.measures, name) for run in runs],
        )
        for name, limit in results.slo.items()
    ]  # fmt: skip
    figure = Figure(
        "Latency by rate",
        "Each point is a run at that rate of requests, in an open loop; the dashed line is the "
        "objective.",
        {"hconcat": panels, "spacing": 40},
    )
    return Section(runs[0].workload, _description(runs), None, [], [figure])


def _themed(spec: Spec) -> dict[str, Any]:
    return {"$schema": SCHEMA, **spec, "config": CONFIG}


@cache
def _library() -> Markup:
    """Vega, Vega-Lite and Vega-Embed; putting them together takes seconds."""
    program = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return Markup(program.replace("</script", "<\\/script"))


def _json(value: object) -> Markup:
    """As it may stand inside a script element."""
    return Markup(msgspec.json.encode(value).decode().replace("<", "\\u003c"))
