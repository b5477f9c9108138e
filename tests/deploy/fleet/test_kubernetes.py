"""The manifests of a fleet use existing names, and fields that KubeRay knows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from container.configuration.resolve import load_configuration
from deploy.fleet.arguments import parse_flags
from deploy.fleet.span import span_of

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "kubernetes" / "fleet"
FIELDS: dict[str, dict[str, type]] = {
    "spec": {"serveConfigV2": str, "rayClusterConfig": dict},
    "rayClusterConfig": {"rayVersion": str, "headGroupSpec": dict, "workerGroupSpecs": list},
    "headGroupSpec": {"rayStartParams": dict, "template": dict},
    "workerGroupSpec": {
        "groupName": str,
        "replicas": int,
        "minReplicas": int,
        "maxReplicas": int,
        "rayStartParams": dict,
        "template": dict,
    },
}
"""The fields that these manifests use, with the types that KubeRay's v1 gives them.

KubeRay's whole definition of a RayService is 1 MB, most of it about pods. This project does not
include it.
"""


@pytest.fixture
def service() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "ray-service.yaml").read_text())


@pytest.fixture
def cluster(service: dict[str, Any]) -> dict[str, Any]:
    return service["spec"]["rayClusterConfig"]


@pytest.fixture
def application(service: dict[str, Any]) -> dict[str, Any]:
    [only] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    return only


def groups(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in groups(cluster)]


def test_kuberay_knows_every_field(service: dict[str, Any], cluster: dict[str, Any]) -> None:
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    [workers] = cluster["workerGroupSpecs"]
    found = {
        "spec": service["spec"],
        "rayClusterConfig": cluster,
        "headGroupSpec": cluster["headGroupSpec"],
        "workerGroupSpec": workers,
    }
    for name, fields in FIELDS.items():
        assert {key: type(value) for key, value in found[name].items()} == fields, name
    for group in groups(cluster):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_the_flags_are_those_of_fleet_serve(application: dict[str, Any]) -> None:
    parsed = parse_flags(application["args"]["flags"].split())
    assert parsed.replicas == 2


def test_the_replicas_have_room(application: dict[str, Any], cluster: dict[str, Any]) -> None:
    arguments, workers = application["args"], cluster["workerGroupSpecs"]
    parsed = parse_flags(arguments["flags"].split())
    limits = [pod["containers"][0]["resources"]["limits"] for pod in pods(cluster)]
    assert arguments["nodes"] == 1 + sum(group["replicas"] for group in workers)
    assert arguments["gpus_per_node"] == max(one.get("nvidia.com/gpu", 0) for one in limits)
    options = load_configuration(FOLDER / "serving.properties", {}).options
    gpus = span_of(options, [arguments["gpus_per_node"]]).gpus
    [worker] = workers
    assert parsed.replicas * gpus <= worker["replicas"] * limits[1]["nvidia.com/gpu"]
    assert parsed.cpus <= float(limits[1]["cpu"])
    assert parsed.surge == 0, "there is no GPU for another replica"
    assert parsed.grace < worker["template"]["spec"]["terminationGracePeriodSeconds"]


def test_the_properties_have_no_warnings_and_are_where_the_flags_say(
    application: dict[str, Any], cluster: dict[str, Any]
) -> None:
    assert not load_configuration(FOLDER / "serving.properties", {}).warnings
    path = parse_flags(application["args"]["flags"].split()).properties
    assert path.name == "serving.properties"
    for pod in pods(cluster):
        [container] = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["properties"] == str(path.parent)
        assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()


def test_the_application_is_there(application: dict[str, Any]) -> None:
    module, _, name = application["import_path"].partition(":")
    path = ROOT / (module.removeprefix("longshore.").replace(".", "/") + ".py")
    assert f"\ndef {name}(" in path.read_text()


def test_one_version_of_ray(cluster: dict[str, Any]) -> None:
    pinned = re.findall(r"ray\[[a-z,]*\]==([\d.]+)", (ROOT / "Makefile").read_text())
    in_image = re.findall(r"ray\[[a-z,]*\]==([\d.]+)", (FOLDER / "Dockerfile").read_text())
    assert pinned == in_image == [cluster["rayVersion"]]


def test_every_pod_is_as_restricted_as_the_image_allows(cluster: dict[str, Any]) -> None:
    for pod in pods(cluster):
        assert pod["securityContext"]["runAsUser"] == 1000, "as in the Dockerfile"
        [container] = pod["containers"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert "serve" in {port["name"] for port in container["ports"]}, "KubeRay looks for it"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_a_change_of_the_properties_changes_the_pods(tmp_path: Path) -> None:
    def names(folder: Path) -> set[str]:
        """Return the names of the ConfigMap that kustomize makes, and of those that pods mount."""
        command = ["kubectl", "kustomize", str(folder)]
        made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        config, service = sorted(yaml.safe_load_all(made), key=lambda one: one["kind"])
        volumes = [pod["volumes"][0] for pod in pods(service["spec"]["rayClusterConfig"])]
        return {config["metadata"]["name"], *(one["configMap"]["name"] for one in volumes)}

    copy = shutil.copytree(FOLDER, tmp_path / "fleet")
    [before] = names(copy)
    (copy / "serving.properties").write_text("option.batching=continuous\n")
    [after] = names(copy)
    assert before != after
