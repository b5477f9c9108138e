"""`deploy up` against a fake AWS: create, repeat, change."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

from deploy.__main__ import main
from deploy.sagemaker.errors import DeployError
from deploy.sagemaker.package import make_package
from deploy.sagemaker.resources.aws import Aws
from deploy.sagemaker.resources.deployment import Deployment
from deploy.sagemaker.resources.tags import TAG
from deploy.sagemaker.up import bring_up
from tests.deploy.conftest import CREATING, IMAGE, REGION, ROLE, Failure, Faulty

BUCKET = f"longshore-123456789012-{REGION}"
Peek = Callable[[str], Any]


def objects(peek: Peek, bucket: str = BUCKET) -> dict[str, str]:
    """Return the prefix of each uploaded file, by the file's name below that prefix."""
    listed = peek("s3").list_objects_v2(Bucket=bucket).get("Contents", [])
    keys = [entry["Key"].split("/", 3) for entry in listed]
    assert all(key[:2] == ["longshore", "demo"] for key in keys)
    return {key[3]: "/".join(key[:3]) for key in keys}


def configuration(peek: Peek) -> dict[str, Any]:
    endpoint = peek("sagemaker").describe_endpoint(EndpointName="demo")
    name = endpoint["EndpointConfigName"]
    return peek("sagemaker").describe_endpoint_config(EndpointConfigName=name)


def test_all_resources_are_created_as_requested_and_tagged(
    faulty: Faulty, peek: Peek, up: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--strategy", "paged", "--max-instances", "3", "--target-concurrency", "20"]
    assert main([*up, *options, "--env", "HF_TOKEN=x=y", "--startup-timeout", "900"]) == 0
    assert "endpoint demo: InService" in capsys.readouterr().out

    (variant,) = configuration(peek)["ProductionVariants"]
    assert variant["InstanceType"] == "ml.g4dn.xlarge"
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] == 900
    assert variant["ModelDataDownloadTimeoutInSeconds"] == 1800
    model = peek("sagemaker").describe_model(ModelName=variant["ModelName"])
    container = model["PrimaryContainer"]
    assert (container["Image"], container["Environment"]) == (IMAGE, {"HF_TOKEN": "x=y"})

    found = objects(peek)
    assert set(found) == {"config.json", "model.safetensors", "onnx/weights", "serving.properties"}
    (prefix,) = set(found.values())
    source = {"S3Uri": f"s3://{BUCKET}/{prefix}/", "S3DataType": "S3Prefix"}
    assert container["ModelDataSource"]["S3DataSource"] == {**source, "CompressionType": "None"}
    body = peek("s3").get_object(Bucket=BUCKET, Key=f"{prefix}/serving.properties")["Body"]
    assert body.read() == b"option.batching=paged\n"

    scaling = peek("application-autoscaling")
    (target,) = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    assert target["ResourceId"] == "endpoint/demo/variant/AllTraffic"
    assert (target["MinCapacity"], target["MaxCapacity"]) == (1, 3)
    (policy,) = scaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
    tracking = policy["TargetTrackingScalingPolicyConfiguration"]
    assert tracking["TargetValue"] == 20
    assert "ConcurrentRequestsPerModel" in str(tracking["PredefinedMetricSpecification"])

    tag = {"Key": TAG, "Value": "demo"}
    endpoint = peek("sagemaker").describe_endpoint(EndpointName="demo")
    for arn in (
        endpoint["EndpointArn"],
        model["ModelArn"],
        configuration(peek)["EndpointConfigArn"],
    ):
        assert tag in peek("sagemaker").list_tags(ResourceArn=arn)["Tags"]
    for name in found:
        tagging = peek("s3").get_object_tagging(Bucket=BUCKET, Key=f"{prefix}/{name}")
        assert tagging["TagSet"] == [tag]


def test_repeating_the_command_creates_nothing(faulty: Faulty, up: list[str]) -> None:
    assert main(up) == 0
    before = faulty.calls.copy()
    assert main(up) == 0
    for operation in ("CreateModel", "CreateEndpointConfig", "CreateEndpoint"):
        assert faulty.calls[operation] == before[operation] == 1


def test_only_changed_resources_are_updated(faulty: Faulty, peek: Peek, up: list[str]) -> None:
    assert main([*up, "--strategy", "none"]) == 0
    faulty.answers("UpdateEndpoint", {"EndpointArn": "arn:aws:sagemaker:::endpoint/demo"})
    assert main([*up, "--strategy", "paged"]) == 0
    (request,) = faulty.bodies["UpdateEndpoint"]
    assert request["EndpointName"] == "demo"
    assert request["RetainAllVariantProperties"], "the instance count set by autoscaling is kept"
    names = [
        endpointconfig["EndpointConfigName"]
        for endpointconfig in peek("sagemaker").list_endpoint_configs()["EndpointConfigs"]
    ]
    assert request["EndpointConfigName"] in names
    assert len(names) == 2


def test_an_update_waits_for_the_previous_one(
    aws: Aws, faulty: Faulty, up: list[str], printed: list[str]
) -> None:
    assert main([*up, "--strategy", "none"]) == 0
    name = boto3.client("sagemaker").list_endpoint_configs()["EndpointConfigs"][0]
    there = {**CREATING, "EndpointConfigName": name["EndpointConfigName"]}
    updating, ready = ({**there, "EndpointStatus": status} for status in ("Updating", "InService"))
    faulty.answers("DescribeEndpoint", updating, updating, updating, ready)
    faulty.answers("UpdateEndpoint", {"EndpointArn": there["EndpointArn"]})
    deployment = Deployment(
        name="demo", image=IMAGE, role=ROLE, instance_type="ml.g4dn.xlarge", instances=2,
        max_instances=2,
    )  # fmt: skip
    package = make_package(model_dir=None, model_id="org/m", properties=None, strategy=None)
    bring_up(aws, deployment, package)
    settled = printed.index("endpoint demo: InService after 30 s")
    assert settled < printed.index("updating endpoint demo")


def test_an_archive_is_uploaded_once(faulty: Faulty, peek: Peek, up: list[str]) -> None:
    for _ in range(2):
        assert main([*up, "--archive", "--strategy", "dynamic"]) == 0
    ((name, prefix),) = objects(peek).items()
    assert name == "model.tar.gz"
    data = peek("s3").get_object(Bucket=BUCKET, Key=f"{prefix}/{name}")["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert {"config.json", "serving.properties"} < set(archive.getnames())
    (variant,) = configuration(peek)["ProductionVariants"]
    model = peek("sagemaker").describe_model(ModelName=variant["ModelName"])
    source = model["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]
    assert (source["S3DataType"], source["CompressionType"]) == ("S3Object", "Gzip")


def test_only_missing_files_are_uploaded(
    faulty: Faulty, peek: Peek, up: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(up) == 0
    ((_, prefix), *_) = objects(peek).items()
    before = {
        name: peek("s3").head_object(Bucket=BUCKET, Key=f"{prefix}/{name}")["LastModified"]
        for name in objects(peek)
    }
    peek("s3").delete_object(Bucket=BUCKET, Key=f"{prefix}/config.json")
    peek("s3").put_object(Bucket=BUCKET, Key=f"{prefix}/onnx/weights", Body=b"half a file")
    assert main(up) == 0
    assert set(objects(peek)) == set(before)
    weights = peek("s3").get_object(Bucket=BUCKET, Key=f"{prefix}/onnx/weights")["Body"].read()
    assert weights == b"w"


def test_a_given_bucket_is_used_and_never_created(
    faulty: Faulty, peek: Peek, up: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*up, "--bucket", "mine"]) == 1
    assert "--bucket mine: bucket does not exist" in capsys.readouterr().err
    place = {"LocationConstraint": REGION}
    peek("s3").create_bucket(Bucket="mine", CreateBucketConfiguration=place)
    assert main([*up, "--bucket", "mine"]) == 0
    assert "model.safetensors" in objects(peek, "mine")


def test_endpoints_of_others_are_left_alone(
    faulty: Faulty, peek: Peek, up: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*up[:2], "other", *up[3:]]) == 0
    name = peek("sagemaker").describe_endpoint(EndpointName="other")["EndpointConfigName"]
    peek("sagemaker").create_endpoint(EndpointName="demo", EndpointConfigName=name)
    assert main(up) == 1
    assert "endpoint demo exists and was not created by deploy" in capsys.readouterr().err
    assert configuration(peek)["EndpointConfigName"] == name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "under_score"}, "--name under_score: expected letters"),
        ({"name": "x" * 60}, "at most 54"),
        ({"instances": 3, "max_instances": 2}, "instances <= max-instances"),
        ({"startup_timeout_s": 30}, "--startup-timeout 30: SageMaker allows 60 to 3600"),
        ({"download_timeout_s": 4000}, "--download-timeout 4000"),
    ],
)
def test_invalid_arguments_are_rejected(change: dict[str, Any], reason: str) -> None:
    given = {"name": "n", "image": IMAGE, "role": ROLE, "instance_type": "ml.m5.xlarge"}
    with pytest.raises(DeployError, match=reason):
        Deployment(**{**given, **change})


def test_a_component_shares_its_instances(faulty: Faulty, up: list[str], model_dir: Path) -> None:
    """moto has no inference components, so the test reads requests that botocore validated."""
    faulty.answers("CreateEndpointConfig", {"EndpointConfigArn": "arn:aws:configuration"})
    faulty.answers("CreateEndpoint", {"EndpointArn": "arn:aws:endpoint"})
    faulty.answers(
        "DescribeEndpoint",
        Failure("ValidationException", 'Could not find endpoint "demo".'),
        {"EndpointStatus": "InService"},
    )
    faulty.answers("CreateInferenceComponent", {"InferenceComponentArn": "arn:aws:component"})
    faulty.answers(
        "DescribeInferenceComponent",
        Failure("ValidationException", 'Could not find component "demo".'),
        {"InferenceComponentStatus": "InService"},
    )
    faulty.answers("RegisterScalableTarget", {})
    faulty.answers("PutScalingPolicy", {"PolicyARN": "arn:aws:policy"})
    options = ["--component", "--accelerators", "2", "--max-instances", "2"]
    up[up.index("--instance-type") + 1] = "ml.g5.12xlarge"
    assert main([*up, *options]) == 0
    (configuration,) = faulty.bodies["CreateEndpointConfig"]
    (variant,) = configuration["ProductionVariants"]
    assert "ModelName" not in variant
    assert variant["ManagedInstanceScaling"]["MaxInstanceCount"] == 2
    assert configuration["ExecutionRoleArn"] == ROLE
    (request,) = faulty.bodies["CreateInferenceComponent"]
    needs = request["Specification"]["ComputeResourceRequirements"]
    (target,) = faulty.bodies["RegisterScalableTarget"]
    assert target["ResourceId"] == "inference-component/demo"
    assert needs == {"NumberOfAcceleratorDevicesRequired": 2, "MinMemoryRequiredInMb": 8192}
