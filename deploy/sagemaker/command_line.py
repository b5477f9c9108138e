"""The commands and options of `longshore deploy`."""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.sagemaker.resources.deployment import GPU_AMI, Deployment

_EXAMPLES = """examples:
  %(prog)s up --name demo --model-id org/name --instance-type ml.g5.2xlarge --role ARN --image URI
  %(prog)s stream --name demo 'Once upon a time'
  %(prog)s down --name demo
"""
STRATEGIES = ("none", "dynamic", "continuous", "paged")


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser. prog: the program's name in its help."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Deploy this container to SageMaker endpoints.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser
    _add_up(add("up", help="create or update an endpoint and wait until it is in service"))
    _add_call(add("invoke", help="send a request to an endpoint and print the answer"))
    _add_call(
        add("stream", help="send a request to an endpoint and print the lines as they arrive")
    )
    _add_name(add("status", help="print the status of an endpoint"))
    logs = add("logs", help="print the last log lines of an endpoint's containers")
    _add_name(logs)
    logs.add_argument(
        "--lines", type=int, default=100, metavar="N", help="number of lines (default: 100)"
    )
    _add_compare(
        add("compare", help="load-test one endpoint per strategy, and remove each one afterwards")
    )
    down = add("down", help="remove everything that `up` created")
    _add_name(down)
    _add_changes(down)
    image = add(
        "image", help="create the ECR repository and print the commands that push the image"
    )
    _add_common(image)
    image.add_argument("--repository", default="longshore", help="default: %(default)s")
    image.add_argument("--tag", default="latest", help="default: %(default)s")
    image.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    image.add_argument(
        "--dry-run", action="store_true", help="print the AWS calls without making them"
    )
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--region", help="default: the region of the AWS CLI's configuration")


def _add_name(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("--name", required=True, help="name of the endpoint and its resources")


def _add_changes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bucket", help="default: longshore-ACCOUNT-REGION, which is created if it does not exist"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=3600,
        metavar="SECONDS",
        help="how long to wait for SageMaker (default: 3600)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the AWS calls without changing anything"
    )


def _add_up(parser: argparse.ArgumentParser) -> None:
    _add_name(parser)
    _add_changes(parser)
    _add_deployment(parser)
    parser.add_argument(
        "--strategy", choices=STRATEGIES, help="batching strategy, which sets option.batching"
    )


def _add_deployment(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default = {name: field.default for name, field in Deployment.__dataclass_fields__.items()}
    add(
        "--image",
        required=True,
        metavar="URI",
        help="the image in ECR; `image` prints the commands that push one",
    )
    add("--role", required=True, metavar="ARN", help="IAM role of the containers")
    add("--instance-type", required=True, metavar="TYPE", help="for example ml.g5.2xlarge")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="directory of the model; it is uploaded without its hidden files",
    )
    model.add_argument(
        "--model-id",
        metavar="ID",
        help="the model's Hugging Face id; the container downloads the model",
    )
    add(
        "--properties",
        type=Path,
        metavar="FILE",
        help="serving.properties to use (default: the one in the model's directory)",
    )
    add("--archive", action="store_true", help="upload one model.tar.gz instead of separate files")
    add(
        "--instances",
        type=int,
        default=default["instances"],
        metavar="N",
        help="minimum and initial number of instances",
    )
    add(
        "--max-instances",
        type=int,
        metavar="N",
        help="maximum number of instances; more than --instances turns on scaling "
        "(default: no scaling)",
    )
    add(
        "--target-concurrency",
        type=int,
        default=default["target_concurrency"],
        metavar="N",
        help="scale so that every instance has this many concurrent requests (default: "
        "%(default)s)",
    )
    add("--startup-timeout", type=int, default=default["startup_timeout_s"], metavar="SECONDS")
    add("--download-timeout", type=int, default=default["download_timeout_s"], metavar="SECONDS")
    add("--ami", help=f"SageMaker AMI version for the instances (default with GPUs: {GPU_AMI})")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable for the container",
    )
    add("--component", action="store_true", help="deploy as an inference component")
    add(
        "--accelerators",
        type=int,
        default=default["accelerators"],
        help="GPUs of each copy of the component",
    )
    add(
        "--memory-mib",
        type=int,
        default=default["memory_mib"],
        help="host memory of each copy of the component, in MiB",
    )


def _add_call(parser: argparse.ArgumentParser) -> None:
    _add_name(parser)
    request = parser.add_mutually_exclusive_group(required=True)
    request.add_argument("inputs", nargs="?", help="the prompt")
    request.add_argument("--body", metavar="JSON", help="the whole request body")
    parser.add_argument("--max-new-tokens", type=int, metavar="N")
    parser.add_argument("--component", metavar="NAME", help="inference component of the endpoint")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    _add_name(parser)
    _add_changes(parser)
    _add_deployment(parser)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory for the results"
    )
    parser.add_argument(
        "--load",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="ARGUMENT",
        help="must come last: all following arguments are passed to `longshore compare`",
    )
