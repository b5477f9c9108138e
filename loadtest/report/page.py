"""Renders text, tables and charts into one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec
import vl_convert
from markupsafe import Markup

from loadtest.load.workloads import WORKLOADS
from loadtest.report import charts, tables, verdict
from loadtest.report.charts import Spec
from loadtest.report.gantt import NUM_SHOWN, gantt
from loadtest.report.regime import conditions, memory, regime
from loadtest.report.rounds import in_rounds
from loadtest.report.style import CONFIG, duration, number
from loadtest.report.tables import Table
from loadtest.study.results import Results, Run
from loadtest.study.slo import value_of
from loadtest.study.tuning import TUNED, Trial

PICTURE_SCALE = 2
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


class Figure(NamedTuple):
    """A chart with its title and explanation."""

    title: str
    text: str
    spec: Spec


class Section(NamedTuple):
    """The part of the page about one workload."""

    title: str
    conditions: str
    """Load and KV memory, for the captions."""
    text: str
    order: str | None
    tables: Sequence[tuple[str, Table]]
    figures: Sequence[Figure]


def write_report(results: Results, folder: Path) -> Path:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["json"] = _json
    page = environment.get_template("page.html").render(
        headline=_headline(results),
        results=results,
        remarks=_remarks(results),
        summary=_summary(results),
        overview=None if results.slo else _themed(_overview(results.runs)),
        goodputs=tables.goodputs(results) if results.objective else None,
        objective=tables.objective(results.objective),
        sections=[_objectives(results)] if results.slo else _sections(results),
        num_rounds=max(run.round for run in results.runs),
        settings=tables.settings(results),
        tuned=TUNED,
        library=_library(),
        themed=_themed,
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def write_markdown(results: Results, folder: Path) -> Path:
    """Write report.md, a text to paste: the headline, warnings, the summary and goodput."""
    blocks = [f"**{_headline(results)}**"]
    blocks += [f"- {remark}" for remark in _remarks(results)]
    blocks.append(tables.markdown(_summary(results)))
    if results.objective:
        bounds = tables.objective(results.objective)
        blocks += [tables.markdown(tables.goodputs(results)), f"Goodput: {bounds}."]
    machine = [f"{name} {value}" for name, value in results.machine.items()]
    blocks.append(f"{results.created[:10]}, seed {results.seed}, {', '.join(machine)}")
    blocks += [f"`{command}`" for command in results.command.splitlines()]
    path = folder / "report.md"
    path.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    return path


def _remarks(results: Results) -> list[str]:
    return [*results.notes, *verdict.remarks(results.runs)]


def _summary(results: Results) -> Table:
    return tables.objectives(results) if results.slo else tables.summary(results.runs)


def write_pictures(results: Results, folder: Path) -> list[Path]:
    """Write every chart as a PNG, for documents and slides; return their paths."""
    figures = {"overview": _overview(results.runs)} if not results.slo else {}
    sections = [_objectives(results)] if results.slo else _sections(results)
    for section in sections:
        for figure in section.figures:
            name = f"{section.title} {figure.title}".lower().replace(" ", "-")
            title = ": ".join(filter(None, [section.title, section.conditions]))
            figures[name] = {**figure.spec, "title": {"text": title, "offset": 12}}
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
    if not table.best:
        return "No server sustains a rate that was tried"
    best = table.rows[table.best[0][0]]
    return f"{best[0]} sustains {best[1]} requests/s"


def _overview(runs: Sequence[Run]) -> Spec:
    return charts.bars([run for run in runs if not run.variant])


def _sections(results: Results) -> list[Section]:
    return [
        _section(
            [run for run in results.runs if run.workload == name],
            [trial for trial in results.trials if trial.workload == name],
        )
        for name in dict.fromkeys(run.workload for run in results.runs)
    ]


def _section(all_runs: Sequence[Run], trials: Sequence[Trial]) -> Section:
    """Return the section of one workload.

    Tables show the median round of each server. Charts show the same runs, without the variants.
    """
    found = in_rounds(all_runs)
    runs = [rounds.typical for rounds in found]
    shown = [
        ("Client measurements", tables.client_measures(runs, found[0].measure)),
        ("Server measurements", tables.server_measures(runs)),
    ]
    if trials:
        shown.append((f"Settings tried for {TUNED}", tables.trials(trials)))
    return Section(
        runs[0].workload,
        "; ".join(conditions(all_runs)),
        " ".join(filter(None, [_description(runs), regime(all_runs)])),
        verdict.order(all_runs),
        shown,
        _figures([run for run in runs if not run.variant]),
    )


def _figures(runs: Sequence[Run]) -> list[Figure]:
    figures = [
        Figure(
            "Latency distributions",
            "Each curve shows the share of requests, or of inter-token gaps, that took at most the "
            "time on the x-axis. Further left is better.",
            charts.latencies(runs),
        )
    ]
    if any(sample.metrics for run in runs for sample in run.samples):
        figures.append(
            Figure(
                "Batch size and KV cache",
                "Top: sequences in the batch. Bottom: the share of the KV cache that is allocated, "
                "and the share that is filled with tokens. The light area is allocated but empty. "
                "Each column has its own time scale.",
                charts.timelines(runs),
            )
        )
    chart = gantt(runs)
    if chart is not None:
        figures.append(
            Figure(
                f"The first {NUM_SHOWN} requests",
                "One row per request in order of arrival; all panels have the same scale. A panel "
                "that takes much longer is cut, and says when its last request ends. Padding is a "
                "slot of a dynamic batch whose request has finished; it stays occupied until the "
                "last request of the batch has finished.",
                chart,
            )
        )
    return figures


def _description(runs: Sequence[Run]) -> str:
    first = runs[0]
    doc = WORKLOADS[first.workload].doc if first.workload in WORKLOADS else ""
    measures = first.measures
    scale = "" if first.length_scale == 1 else f" All lengths × {first.length_scale:g}."
    loop, counts = first.loop, sorted({len(run.records) for run in runs})
    if len({run.loop for run in runs}) > 1:  # in a sweep, the rate at the end of `loop` differs
        loop = loop.rsplit(",", 1)[0]
    text = (
        f"{doc[:1].upper()}{doc[1:]}.{scale} {loop[:1].upper()}{loop[1:]}. "
        f"{' to '.join(map(str, counts[:1] + counts[1:][-1:]))} requests per run, with "
        f"{number(measures.prompt_tokens)} prompt tokens and {number(measures.output_tokens)} "
        "output tokens on average; end-of-sequence tokens are ignored."
    )
    if size := memory(runs):
        text += f" {size}."
    if first.num_left_out:
        text += f" {first.num_left_out} requests were skipped as too long for the server."
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
        "Latency by request rate",
        "Each point is a run in an open loop at that request rate. The horizontal line "
        "is the objective.",
        {"hconcat": panels, "spacing": 40},
    )
    size = memory(runs) or ""  # the load differs from point to point
    return Section(runs[0].workload, size, _description(runs), None, [], [figure])


def _themed(spec: Spec) -> dict[str, Any]:
    return {"$schema": SCHEMA, **spec, "config": CONFIG}


@cache
def _library() -> Markup:
    """Return Vega, Vega-Lite and Vega-Embed in one script; bundling them takes seconds."""
    program = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return Markup(program.replace("</script", "<\\/script"))


def _json(value: object) -> Markup:
    """Encode a value so that it is safe inside a script element."""
    return Markup(msgspec.json.encode(value).decode().replace("<", "\\u003c"))
