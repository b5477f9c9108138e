"""A config file of Ray Serve, such as KubeRay passes on, describes a fleet."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from core.configuration.options import Options
from core.errors import ConfigurationError
from tests.container.processes import ROOT
from tests.deploy.fleet.on_ray.conftest import demo

FOLDER = ROOT / "deploy" / "kubernetes" / "fleet"
PROPERTIES = "/etc/longshore/serving.properties"


def config_of_the_manifest() -> dict[str, object]:
    service = yaml.safe_load((FOLDER / "ray-service.yaml").read_text())
    return yaml.safe_load(service["spec"]["serveConfigV2"])


def test_serve_accepts_the_manifests_config():
    from ray.serve.schema import ServeDeploySchema

    [application] = ServeDeploySchema.model_validate(config_of_the_manifest()).applications
    assert application.route_prefix == "/"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"flags": "--replicas 2", "nodes": 2}, "gpus_per_node is None; expected int"),
        ({"flags": "--replicas 2", "nodes": 2, "gpus_per_node": 0}, "flags: the following"),
        ({"flags": "--properties a --port 1", "nodes": 2, "gpus_per_node": 0}, "--port"),
        ({"flags": "--properties a", "nodes": 2, "gpus_per_node": 0}, "--properties a: no such"),
        (
            {"flags": "", "nodes": 2, "gpus_per_node": 0, "node": 1},
            "args: unknown: node; known are flags, nodes",
        ),
    ],
)
def test_bad_arguments_are_explained(arguments: dict[str, object], why: str):
    from deploy.fleet.serve_config import build

    with pytest.raises(ConfigurationError, match=why):
        build(arguments)


def test_serve_gets_the_application(tmp_path: Path):
    """The test calls the application's builder as Serve does.

    The arguments are those of the manifest, but with other properties and no GPU.
    """
    from ray.serve import Application
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call
    from ray.serve.schema import ServeDeploySchema

    from deploy.fleet.serve_config import build

    properties = tmp_path / "serving.properties"
    properties.write_text(demo("paged"))
    [application] = ServeDeploySchema.model_validate(config_of_the_manifest()).applications
    flags = application.args["flags"].replace(PROPERTIES, str(properties))
    assert str(properties) in flags
    built = call(build, application.args | {"flags": flags, "gpus_per_node": 0})
    assert isinstance(built, Application)


def test_a_link_to_the_properties_is_not_followed(tmp_path: Path):
    """In a ConfigMap's volume, the link leads to a folder that has another name in each pod."""
    from deploy.fleet.application import fleet_of
    from deploy.fleet.arguments import parse_flags

    link = tmp_path / "serving.properties"
    link.symlink_to(tmp_path / "..data")
    assert fleet_of(parse_flags(["--properties", str(link)]), Options()).properties == link


def test_each_node_of_a_local_cluster_has_room_for_whole_replicas():
    """An update starts a third replica of 2 cores beside two. Two nodes of 3 cores would not do."""
    from deploy.fleet.application import fleet_of
    from deploy.fleet.arguments import parse_flags

    flags = ["--properties", "x", "--replicas", "2", "--cpus", "2", "--surge", "50"]
    assert fleet_of(parse_flags(flags), Options()).cpus_of_node(2) == 4
