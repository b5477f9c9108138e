"""compose.yaml and the dashboard ask for what is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from flask.testing import FlaskClient

from tests.container.processes import ROOT

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
GRAFANA = ROOT / "monitoring" / "grafana"
DASHBOARD = json.loads((GRAFANA / "longshore.json").read_text())


def mounted(service: str) -> dict[str, Path]:
    """Files of the checkout by where the service sees them."""
    volumes = [each.rsplit(":", 2) for each in COMPOSE[service]["volumes"]]
    assert {mode for _, _, mode in volumes} == {"ro"}
    return {inside: ROOT / source.removeprefix("./") for source, inside, _ in volumes}


def test_what_is_mounted_is_there() -> None:
    for service in ("prometheus", "grafana"):
        assert all(path.is_file() for path in mounted(service).values())


def test_prometheus_asks_the_container() -> None:
    (path,) = mounted("prometheus").values()
    (job,) = yaml.safe_load(path.read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    service, port = target.split(":")
    assert COMPOSE[service]["ports"] == [f"{port}:{port}"]
    assert COMPOSE[service]["command"] == "serve"


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    files = mounted("grafana")
    source = yaml.safe_load(
        files["/etc/grafana/provisioning/datasources/longshore.yaml"].read_text()
    )
    (prometheus,) = source["datasources"]
    assert prometheus["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {prometheus["uid"]}
    provider = files["/etc/grafana/provisioning/dashboards/longshore.yaml"].read_text()
    (provided,) = yaml.safe_load(provider)["providers"]
    home = COMPOSE["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert str(Path(home).parent) == provided["options"]["path"]
    assert files[home] == GRAFANA / "longshore.json"


def test_the_dashboard_asks_for_metrics_that_exist(http: FlaskClient) -> None:
    response = http.get("/metrics")
    if response.status_code == 404:
        pytest.skip("there are no metrics")
    exported = set(re.findall(r"^((?:vllm|longshore):\w+)", response.get_data(as_text=True), re.M))
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"(?:vllm|longshore):\w+", " ".join(expressions)))
    assert len(asked) > 10
    by_label = {"longshore:preemptions_total", "vllm:request_success_total"}
    assert asked <= exported | by_label, "those come with their first label"
