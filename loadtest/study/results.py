"""Results of a command, written to and read from files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadtest.load.record import Record, Timings
from loadtest.servers.watch import Sample
from loadtest.study.measures import Measures
from loadtest.study.tuning import Trial


class Run(msgspec.Struct, kw_only=True):
    """One workload run against one server."""

    name: str
    """Strategy, or the target server's name."""
    variant: str = ""
    """How the workload differs from that of the other servers, if it does."""
    workload: str
    loop: str
    """Description of the closed or open loop."""
    users: int | None
    """Users of a closed loop; None in an open one."""
    rate: float | None
    """Mean requests per second sent in an open loop."""
    length_scale: float = 1.0
    num_left_out: int
    tokens_per_word: float
    start_s: float | None
    """Seconds until the server was ready; None if it was running already."""
    warm_up_s: float
    settings: dict[str, str] = {}
    """The server's properties."""
    is_whole: bool
    """False if the run was interrupted."""
    round: int = 1
    """Number of the round, from 1."""
    num_discarded: int = 0
    """Earlier attempts at this run that were discarded because other processes were busy."""
    measures: Measures
    gap_quantiles_s: list[float]
    records: list[Record]
    samples: list[Sample]

    @property
    def strategy(self) -> str:
        """The batching strategy; empty if the server is not ours."""
        return self.settings.get("option.batching", "")

    @property
    def batches(self) -> list[float]:
        """How many sequences ran at once, by sample."""
        found = [sample.metrics.get("running") for sample in self.samples]
        return [count for count in found if count is not None]

    @property
    def label(self) -> str:
        return f"{self.name}, {self.variant}" if self.variant else self.name


class Results(msgspec.Struct, kw_only=True):
    """All runs of a command."""

    command: str
    created: str
    """UTC, in ISO 8601."""
    seed: int
    fresh_servers: bool = True
    """Whether each run had a server of its own; otherwise servers stayed up, idle, between runs."""
    machine: dict[str, str]
    notes: list[str] = []
    slo: dict[str, float] = {}
    """Bounds of a sweep in seconds, by measure, such as `ttft_p99`."""
    objective: dict[str, float] = {}
    """Bounds in seconds, by kind, such as `ttft`, that a request must meet to count for goodput."""
    trials: list[Trial] = []
    """Settings of dynamic batching tried before the rounds."""
    runs: list[Run] = []

    def write(self, folder: Path) -> None:
        """Write results.json, and requests.csv with a row per request."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_bytes(msgspec.json.encode(self))
        with (folder / "requests.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["workload", "run", "round", "rate", *Record.__struct_fields__[:-1], *_TIMINGS]
            )
            for run in self.runs:
                writer.writerows(_row(run, record) for record in run.records)


_TIMINGS = Timings.__struct_fields__


def _row(run: Run, record: Record) -> Sequence[object]:
    fields = [getattr(record, name) for name in Record.__struct_fields__[:-1]]
    timings = [getattr(record.timings, name, None) for name in _TIMINGS]
    return [run.workload, run.label, run.round, run.rate, *fields, *timings]


def read_results(path: Path) -> Results:
    """Read results.json, given its path or folder. Raises ValueError with the path in its text."""
    file = path / "results.json" if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=Results)
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"cannot read {file}: {reason}; give the folder or results.json of compare or sweep"
        ) from error
