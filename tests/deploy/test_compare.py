"""`deploy compare`: endpoints are measured one by one, and each is removed, even after an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy.sagemaker.compare import LoadTest, compare
from deploy.sagemaker.errors import DeployError
from deploy.sagemaker.resources.aws import Aws

RATES = {"none": 2.0, "paged": 9.0}


class Scene:
    """Records the operations in order."""

    def __init__(self, aws: Aws, out: Path) -> None:
        self.aws, self.out = aws, out
        self.done: list[str] = []
        self.reported: list[str] = []
        self.fails_at: dict[str, BaseException] = {}

    def __call__(self, what: str) -> None:
        self.done.append(what)
        if what in self.fails_at:
            raise self.fails_at[what]

    def report(self, folders: Sequence[Path], out: Path) -> None:
        assert out == self.out
        self.reported = [folder.name for folder in folders]

    def measure(self, endpoint: str, out: Path) -> None:
        self(f"test {endpoint}")
        rate = RATES[out.name]
        spread = {"mean": 0.5, "p50": 0.4, "p90": 0.8, "p99": 1.25, "max": 2.0}
        measures = {
            "requests_per_s": rate,
            "tokens_per_s": 100 * rate,
            "num_errors": 0,
            "first_token": spread,
        }
        out.mkdir(parents=True)
        (out / "results.json").write_text(json.dumps({"runs": [{"measures": measures}]}))

    def run(self) -> None:
        compare(
            self.aws,
            "x",
            ["none", "paged"],
            bring_up=lambda name, strategy: self(f"up {name} {strategy}"),
            load_test=self,
            take_down=lambda name: self(f"down {name}"),
            out=self.out,
        )


@pytest.fixture
def scene(aws: Aws, tmp_path: Path) -> Scene:
    return Scene(aws, tmp_path / "out")


NONE = ["up x-none none", "test x-none", "down x-none"]
PAGED = ["up x-paged paged", "test x-paged", "down x-paged"]


def test_every_strategy_is_deployed_measured_and_removed(scene: Scene, printed: list[str]) -> None:
    scene.run()
    assert scene.done == [*NONE, *PAGED]
    assert scene.reported == ["none", "paged"]
    _, first, second = printed[-3:]
    assert first.split() == ["none", "2.00", "1.00x", "200", "0.40", "s", "1.25", "s", "0"]
    assert second.split()[:4] == ["paged", "9.00", "4.50x", "900"]


@pytest.mark.parametrize(
    ("place", "done", "rows"),
    [
        ("up x-none none", ["up x-none none", "down x-none"], []),
        ("test x-none", NONE, []),
        ("up x-paged paged", [*NONE, "up x-paged paged", "down x-paged"], ["none"]),
        ("test x-paged", [*NONE, *PAGED], ["none"]),
        ("down x-none", NONE, ["none"]),
    ],
)
@pytest.mark.parametrize("error", [DeployError("no"), KeyboardInterrupt()])
def test_an_error_removes_the_endpoint_and_reports_the_results_so_far(
    scene: Scene,
    printed: list[str],
    place: str,
    done: list[str],
    rows: list[str],
    error: BaseException,
) -> None:
    scene.fails_at[place] = error
    with pytest.raises(type(error)):
        scene.run()
    assert scene.done == done, "the endpoint is removed"
    assert [line.split()[0] for line in printed[1:]] == rows, "results so far are reported"
    assert scene.reported == rows


@pytest.mark.parametrize(("code", "error"), [(3, DeployError), (130, KeyboardInterrupt)])
def test_the_load_test_runs_as_a_command(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type
) -> None:
    package = tmp_path / "loadtest"
    package.mkdir()
    (package / "__main__.py").write_text(
        "import json, os, sys\n"
        "json.dump([sys.argv[1:], os.environ['AWS_DEFAULT_REGION']], open('called.json', 'w'))\n"
        "sys.exit(int(os.environ['CODE']))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CODE", "0")
    load_test = LoadTest(aws, ["--users", "8"])
    load_test.measure("x-none", tmp_path / "out")
    called = ["compare", "--sagemaker", "x-none", "--out", str(tmp_path / "out"), "--users", "8"]
    assert json.loads(Path("called.json").read_text()) == [called, "eu-west-1"]
    monkeypatch.setenv("CODE", str(code))
    with pytest.raises(error):
        load_test.report([tmp_path / "a", tmp_path / "b"], tmp_path)
    called = ["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path)]
    assert json.loads(Path("called.json").read_text()) == [called, "eu-west-1"]
