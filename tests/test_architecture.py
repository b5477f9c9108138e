"""Which packages may import which, and which may import torch (docs/structures.md)."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WALL_CLOCK = {
    # the field `created` of an answer or a model
    "chat/api.py", "completions/api.py", "responses/api.py", "tasks/rerank.py",
    "http/service.py",
    "text/chat_template.py",  # strftime_now, today's date in a prompt
    "tracing/request_spans.py", "serve/emf.py",  # when something was, for a monitoring service
    "http/metrics.py",  # a gauge whose value is the time
    "invocations/sessions.py",  # several machines may share the files
    "observers/store.py", "process/measured.py",  # the age of files
}  # fmt: skip
"""Files that may read the wall clock, each because it tells the time to somebody else."""
MAY_IMPORT = {
    "core": set(),
    "kernels": set(),
    "strategies": {"core"},
    "engine": {"core", "kernels", "strategies"},
    "container": {"core"},  # talks to the engine only over the socket
    "benchmarks": {"container", "core", "engine", "kernels", "strategies"},
    "loadtest": set(),  # talks HTTP to any server
    "models": set(),
    "deploy": set(),  # runs the load test as a command
    "deploy/fleet": {"container", "core"},  # starts containers on the nodes of a Ray cluster
    "examples": {"deploy", "longshore"},  # one parses SageMaker's streams, one uses the class LLM
    # runs the commands of the other packages
    "longshore": {"benchmarks", "container", "core", "deploy", "engine", "loadtest"},
    "packaging": set(),
}
PARTS = {
    "engine": (
        ("device", "staging", "phases", "stopwatch", "executor", "shard", "group", "digest"),
        ("attention", "sampling"),
        ("step",),
        ("ranks",),
        ("model",),
        ("lora", "scores", "speculation", "vision"),
        ("loading",),
        ("resolve", "failures", "observers", "encoder"),
        ("memory",),
        ("engine",),
        ("builders",),
        ("build", "follow"),
        ("tasks",),
        ("serve", "offline"),
        ("__init__", "__main__"),
    ),
    "container": (
        ("configuration", "capacity", "schema", "wire", "isolation"),
        ("model_files", "http"),
        ("security", "tracing"),
        ("launch", "apis", "hooks", "ui"),
        ("front_end",),
        ("multi_model",),
        ("batch",),
        ("verify",),
        ("chosen_models",),
        ("__main__",),
    ),
    "container.apis": (
        ("model_choice", "named_model"),
        ("generation", "tasks", "adapter_routes", "model_routes", "invocations", "status"),
        ("scores",),
        ("openai", "openapi", "text"),
        ("chat", "completions", "tokenize"),
        ("embeddings", "anthropic", "responses", "text_generation"),
        ("table",),
    ),
    "engine.tasks": (
        ("performer", "lengths", "turns", "variants"),
        ("loading", "engine"),
        ("embedding", "handlers", "pipelines"),
        ("build",),
    ),
}
"""The parts of a package (its folders and the modules beside them), the lowest layer first.

A part may import itself, and the parts of the rows that come before its own in this table. If
one of two parts in a row imports the other, the other must not import it.
"""
UNPICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
HEAVY = {"torch", "transformers", "triton"}
MAY_BE_HEAVY = {"kernels", "engine", "benchmarks", "models"}


def imported_roots(path: Path) -> set[str]:
    """Return the top-level packages of all imports in a file, wherever in the file they are."""
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            roots.add(node.module.split(".")[0])
    return roots


def imported_parts(path: Path, package: str) -> set[str]:
    """Return the parts of a package from which a file imports."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        prefix = f"{package}."
        parts |= {n.removeprefix(prefix).split(".")[0] for n in names if n.startswith(prefix)}
    return parts


@pytest.mark.parametrize("package", PARTS)
def test_folders_import_downwards(package):
    folder = ROOT / package.replace(".", "/")
    rows = {part: row for row, parts in enumerate(PARTS[package]) for part in parts}
    found = {path.relative_to(folder).parts[0].removesuffix(".py") for path in folder.rglob("*.py")}
    assert found - {"__init__"} == rows.keys() - {"__init__"}, "the table names every part"
    arrows = set()
    for path in folder.rglob("*.py"):
        part = path.relative_to(folder).parts[0].removesuffix(".py")
        others = (imported_parts(path, package) & rows.keys()) - {part}
        arrows |= {(part, other) for other in others}
        for other in others:
            row = rows.get(part, len(rows))
            assert rows[other] <= row, f"{path.relative_to(ROOT)} imports {other}, which is above"
    assert not {(there, here) for here, there in arrows} & arrows


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_follow_the_allowed_directions(package):
    inner = [name for name in MAY_IMPORT if name.startswith(f"{package}/")]
    files = [
        path
        for path in (ROOT / package).rglob("*.py")
        if not any(path.is_relative_to(ROOT / name) for name in inner)
    ]
    assert files
    for path in files:
        roots = imported_roots(path)
        allowed = MAY_IMPORT[package] | {package.partition("/")[0]}
        assert not roots & MAY_IMPORT.keys() - allowed, f"{path}: may import {sorted(allowed)}"
        if package not in MAY_BE_HEAVY:
            assert not roots & HEAVY, f"{path}: {package}/ must load without {sorted(HEAVY)}"


@pytest.mark.parametrize("package", ["core", "strategies", "kernels", "engine", "container"])
def test_nothing_unpickles(package):
    """Pickle files can run code when they are read (docs/security.md)."""
    for path in (ROOT / package).rglob("*.py"):
        assert not imported_roots(path) & UNPICKLES, path
        for node in ast.walk(ast.parse(path.read_text())):
            is_load = isinstance(node, ast.Attribute) and node.attr == "load"
            assert not (is_load and ast.unparse(node) == "torch.load"), path
            assert not (isinstance(node, ast.keyword) and node.arg == "weights_only"
                        and ast.unparse(node.value) != "True"), path  # fmt: skip


def test_the_front_end_loads_without_torch():
    modules = (
        "container.front_end.worker, container.front_end.app, container.front_end.start, "
        "container.wire.engine_client, container.multi_model.server"
    )
    code = f"import sys, {modules}; sys.exit(any(name in sys.modules for name in {HEAVY}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "modules",
    [
        "container.front_end.app",
        "engine.builders.packed, engine.serve.server, engine.serve.text_service",
    ],
)
def test_llguidance_is_imported_by_the_first_grammar(modules):
    code = f"import sys, {modules}; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "modules",
    [
        "engine.serve.server, engine.serve.task_service, engine.tasks.build",
        "engine.build, engine.builders.packed, engine.ranks.follower",
    ],
)
def test_engines_of_handlers_and_other_ranks_do_not_import_transformers_models(modules):
    """Nor does a model's config, which imports one module while torch seems to be missing."""
    code = (
        f"import sys, {modules}, transformers.tokenization_utils_base\n"
        "import transformers.configuration_utils, transformers.video_utils\n"
        "from pathlib import Path\n"
        "from engine.loading import open_model\n"
        "before = {*sys.modules}\n"
        "open_model._import_validators()\n"
        "new = {*sys.modules} - before\n"
        "open_model.read_config(Path('models/demo'), False)\n"
        "heavy = {'transformers.modeling_utils', 'transformers.activations'} & {*sys.modules}\n"
        "sys.exit(bool(heavy) or new != {'transformers.utils.type_validators'})"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_only_route_functions_use_the_globals_of_flask():
    """Other functions get the request as an argument (container/http/request_context.py)."""
    users = set()
    for path in (ROOT / "container").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "flask":
                names = {alias.name for alias in node.names}
                if names & {"g", "request", "current_app", "session"}:
                    users.add(path.relative_to(ROOT / "container").as_posix())
    assert users == {
        "apis/adapter_routes.py",
        "apis/invocations/routing.py",
        "apis/invocations/runtime.py",
        "apis/model_routes.py",
        "apis/invocations/upgrade.py",
        "security/authentication.py",
        "http/cors.py",
        "http/failures.py",
        "http/headers.py",
        "http/health.py",
        "http/request_context.py",
        "http/request_log.py",
        "hooks/app.py",
        "multi_model/app.py",
        "multi_model/relay.py",
        "tracing/tracing.py",
        "ui/routes.py",
    }


def test_only_timestamps_read_the_wall_clock():
    """Somebody may set it. Deadlines, heartbeats and limits use the monotonic clock."""
    uses = re.compile(
        r"\b(time\.time(_ns)?|localtime|gmtime|ctime|strftime)\b|"
        r"\b(datetime|date)\.(now|utcnow|today)\(|\bst_mtime\b"
    )
    packages = ("core", "strategies", "kernels", "engine", "container", "deploy/fleet")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    found = {"/".join(path.parts[-2:]) for path in files if uses.search(path.read_text())}
    assert found == WALL_CLOCK


def test_kernels_init_imports_nothing_and_has_no_version():
    """transformers looks for a package named `kernels` and imports it if found."""
    path = ROOT / "kernels" / "__init__.py"
    assert imported_roots(path) == set()
    assert "__version__ =" not in path.read_text()


def test_the_distribution_named_kernels_is_not_installed():
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")
    found = importlib.util.find_spec("kernels")
    assert found is not None
    assert found.origin == str(ROOT / "kernels" / "__init__.py")
