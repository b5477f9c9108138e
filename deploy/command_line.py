"""The commands of `python -m deploy` and their options."""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.deployment import GPU_AMI, Deployment

STRATEGIES = ("none", "dynamic", "continuous", "paged")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy", description="SageMaker endpoints of this container."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser
    _add_up(add("up", help="make or change an endpoint, and wait until it is in service"))
    _add_call(add("invoke", help="ask an endpoint, and print the answer"))
    _add_call(add("stream", help="ask an endpoint, and print the answer's lines as they come"))
    _add_name(add("status", help="say how an endpoint is"))
    logs = add("logs", help="print the last lines of its containers")
    _add_name(logs)
    logs.add_argument("--lines", type=int, default=100, metavar="N")
    _add_compare(add("compare", help="load-test an endpoint for each strategy, then remove it"))
    down = add("down", help="remove everything that up has made")
    _add_name(down)
    _add_changes(down)
    image = add("image", help="make the repository in ECR, and say how to push the image to it")
    _add_common(image)
    image.add_argument("--repository", default="longshore")
    image.add_argument("--tag", default="latest")
    image.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    image.add_argument("--dry-run", action="store_true", help="print every call, make none")
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--region", help="default: as the AWS command line finds it")


def _add_name(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("--name", required=True, help="of the endpoint and all that belongs to it")


def _add_changes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bucket", help="default: longshore-ACCOUNT-REGION, made where missing")
    parser.add_argument(
        "--timeout", type=float, default=3600, metavar="SECONDS", help="to wait for SageMaker"
    )
    parser.add_argument("--dry-run", action="store_true", help="print every call, change nothing")


def _add_up(parser: argparse.ArgumentParser) -> None:
    _add_name(parser)
    _add_changes(parser)
    _add_deployment(parser)
    parser.add_argument("--strategy", choices=STRATEGIES, help="sets option.batching")


def _add_deployment(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default = {name: field.default for name, field in Deployment.__dataclass_fields__.items()}
    add("--image", required=True, metavar="URI", help="in ECR; `image` says how it gets there")
    add("--role", required=True, metavar="ARN", help="that the containers run under")
    add("--instance-type", required=True, metavar="TYPE", help="such as ml.g5.2xlarge")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model-dir", type=Path, metavar="DIR", help="uploaded, hidden files aside")
    model.add_argument("--model-id", metavar="ID", help="of the hub: the container fetches it")
    add("--properties", type=Path, metavar="FILE", help="default: DIR/serving.properties")
    add("--archive", action="store_true", help="upload one model.tar.gz, not file by file")
    add("--instances", type=int, default=default["instances"], metavar="N", help="least, at first")
    add("--max-instances", type=int, metavar="N", help="scale up to so many (default: not at all)")
    add(
        "--target-concurrency",
        type=int,
        default=default["target_concurrency"],
        metavar="N",
        help="requests at once on each instance above which to scale (default: %(default)s)",
    )
    add("--startup-timeout", type=int, default=default["startup_timeout_s"], metavar="SECONDS")
    add("--download-timeout", type=int, default=default["download_timeout_s"], metavar="SECONDS")
    add("--ami", help=f"SageMaker's image of the instance (default with GPUs: {GPU_AMI})")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="of the container")
    add("--component", action="store_true", help="as an inference component")
    add("--accelerators", type=int, default=default["accelerators"], help="of a component's copy")
    add("--memory-mib", type=int, default=default["memory_mib"], help="of a component's copy")


def _add_call(parser: argparse.ArgumentParser) -> None:
    _add_name(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("inputs", nargs="?", help="the prompt")
    what.add_argument("--body", metavar="JSON", help="the whole request")
    parser.add_argument("--max-new-tokens", type=int, metavar="N")
    parser.add_argument("--component", metavar="NAME", help="an inference component of it")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    _add_name(parser)
    _add_changes(parser)
    _add_deployment(parser)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the results")
    parser.add_argument(
        "--load",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="ARGUMENT",
        help="what follows goes to python -m loadtest",
    )
