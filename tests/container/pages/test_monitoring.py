"""compose.yaml and the dashboard refer to existing files, routes and metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from flask.testing import FlaskClient

from tests.container.processes import ROOT

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
GRAFANA = ROOT / "deploy/monitoring/grafana"
DASHBOARD = json.loads((GRAFANA / "longshore.json").read_text())


def mounted(service: str) -> dict[str, Path]:
    """Return the mounted files of the checkout by their path in the service."""
    volumes = [volume.rsplit(":", 2) for volume in COMPOSE[service]["volumes"]]
    assert {mode for _, _, mode in volumes} == {"ro"}
    return {inside: ROOT / source.removeprefix("./") for source, inside, _ in volumes}


def test_mounted_files_exist() -> None:
    for service in ("prometheus", "grafana"):
        assert all(path.is_file() for path in mounted(service).values())


def test_prometheus_scrapes_the_container() -> None:
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


def test_the_dashboard_queries_existing_metrics(http: FlaskClient) -> None:
    response = http.get("/metrics")
    assert response.status_code == 200
    exported = set(re.findall(r"^((?:vllm|longshore):\w+)", response.get_data(as_text=True), re.M))
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    queried = set(re.findall(r"(?:vllm|longshore):\w+", " ".join(expressions)))
    assert len(queried) > 10
    by_label = {"longshore:preemptions_total", "vllm:request_success_total"}
    speculation = (ROOT / "engine/speculation/start.py").read_text()
    of_drafts = {f"{name}_total" for name in re.findall(r'"((?:vllm|longshore):\w+)"', speculation)}
    assert queried <= exported | by_label | of_drafts, "by label: it appears once it is counted"
