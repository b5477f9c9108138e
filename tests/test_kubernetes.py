"""The manifests agree with the container: its arguments, port, paths, metrics and times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from container.__main__ import main
from container.configuration.resolve import load_configuration
from container.http.health import HEALTH_PATHS
from container.http.metrics import metrics_text
from container.launch.stop_times import ENGINE_STOP_S, FRONT_END_STOP_S
from container.wire.engine_state import EngineState
from core.configuration.options import Options
from tests.container.fake_engine import FACTS

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "kubernetes"


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.fixture
def pod() -> dict[str, Any]:
    return manifest("deployment.yaml")["spec"]["template"]["spec"]


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    [only] = pod["containers"]
    return only


def test_kustomize_lists_every_manifest() -> None:
    listed = set(manifest("kustomization.yaml")["resources"])
    assert listed == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}


def test_everything_selects_the_pods_of_the_deployment() -> None:
    deployment = manifest("deployment.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert manifest("service.yaml")["spec"]["selector"] == labels
    for name in ("disruption-budget.yaml", "service-monitor.yaml"):
        assert manifest(name)["spec"]["selector"]["matchLabels"] == labels
    target = manifest("autoscaler.yaml")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])


def test_the_container_takes_the_arguments(
    container: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *arguments = container["args"]
    assert command == "serve"
    place = arguments.index("--properties") + 1
    assert arguments[place] == "/etc/longshore/serving.properties"
    arguments[place] = str(FOLDER / "serving.properties")
    place = arguments.index("--port")
    port = int(arguments[place + 1])
    del arguments[place : place + 2]  # `explain` has no --port
    assert main(["explain", *arguments]) == 0
    assert "batching" in capsys.readouterr().out
    assert container["ports"] == [{"name": "http", "containerPort": port}]


def test_the_properties_have_no_warnings() -> None:
    configuration = load_configuration(FOLDER / "serving.properties", {})
    assert configuration.options.strategy.batching == "paged"
    assert not configuration.warnings


def test_probes_ask_for_health(container: dict[str, Any]) -> None:
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {probe["httpGet"]["path"] for probe in probes.values()} <= set(HEALTH_PATHS)
    start = probes["startup"]
    assert (
        start["periodSeconds"] * start["failureThreshold"]
        >= Options().execution.model_loading_timeout
    )


def test_requests_may_end_before_the_pod_is_killed(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    pause_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    needed_s = pause_s + FRONT_END_STOP_S + ENGINE_STOP_S
    assert pod["terminationGracePeriodSeconds"] > needed_s


def test_the_autoscaler_reads_a_metric_that_exists() -> None:
    [metric] = manifest("autoscaler.yaml")["spec"]["metrics"]
    engine = SimpleNamespace(state=EngineState("", FACTS))
    client: Any = SimpleNamespace(facts=FACTS, copies=[engine])
    text = metrics_text(client, "demo", Options()).decode()
    assert f"\n{metric['pods']['metric']['name']}{{" in text


def test_the_container_runs_as_user_1000_and_writes_only_to_tmp(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert pod["securityContext"]["runAsUser"] == 1000, "as in the Dockerfile"
    writable = [
        mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
    ]
    assert writable == ["/tmp"]
