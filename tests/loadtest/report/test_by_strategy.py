"""The page of locust that has a line for each strategy."""

from __future__ import annotations

import re

from flask import Flask

from loadtest.by_strategy import ByStrategy, smoothed
from loadtest.report.style import OTHER, STRATEGIES
from tests.loadtest.report.known_runs import record


def test_a_point_is_the_mean_of_the_seconds_before_it() -> None:
    assert smoothed([5, 0, 4, 3, 8, 10, 99]) == [5.0, 2.5, 3.0, 3.0, 4.0, 5.0]
    assert smoothed([7]) == smoothed([]) == [], "the last second is left out, as it may not be over"


def test_each_strategy_keeps_its_last_run() -> None:
    lines = ByStrategy()
    lines.add(record(0), 9.0)
    for label, strategy, started, ends in (
        ("aws on none", "none", 100.0, (100.5, 101.5, 102.5)),
        ("aws on paged", "paged", 200.0, (201.1,)),
        ("aws", None, 300.0, ()),
        ("aws on paged", "paged", 400.0, (400.1, 400.2, 402.9)),
    ):
        lines.begin(label, strategy, started)
        for at in ends:
            lines.add(record(0), at)
            lines.add(record(0, error="refused"), at)
    assert lines.data() == [
        {
            "label": "aws on none",
            "colour": STRATEGIES["none"],
            "requests/s": [1.0, 1.0],
            "output tokens/s": [10.0, 10.0],
        },
        {"label": "aws", "colour": OTHER, "requests/s": [], "output tokens/s": []},
        {
            "label": "aws on paged",
            "colour": STRATEGIES["paged"],
            "requests/s": [2.0, 1.0],
            "output tokens/s": [20.0, 10.0],
        },
    ]


def test_the_page_fetches_its_data_from_a_relative_address() -> None:
    app, lines = Flask(__name__), ByStrategy()
    lines.begin("aws on paged", "paged", 0.0)
    lines.serve(app)
    http = app.test_client()
    page = http.get("/strategies").text
    (address,) = re.findall(r'fetch\("([^"]+)"\)', page)
    (line,) = http.get(f"/{address}").json
    assert line.keys() >= set(re.findall(r'<svg id="([^"]+)"', page))
