"""What a compiled step did and expects: plain data that saves to JSON and renders in any process.

A `GraphRecord` describes one compiled graph (a forward, a backward); a `StepRecord` holds all graphs of
one process; a `Report` holds the step of every rank that was collected. The backend calls `add` after
each compilation; `overlapc.report()` gives back the report of this process.

Times are nanoseconds since the graph's first launch, as the simulator predicts them; sizes are bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from overlapc.errors import ConfigError, OverlapcError

FORMAT = 1  # of record.json; raised when a reader of the old one would misread the new one


@dataclass(frozen=True, slots=True)
class Span:
    """One node on one resource. `lane` is "compute" or a queue such as "@dp"."""

    node: str
    lane: str
    start_ns: float
    end_ns: float
    kind: str  # the node's schedule.Kind as text, or "idle": compute stands still for what `node` waits for
    origin: str = ""  # module path or source line


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One collective: how long it is, and how much of that compute hides before and after the passes."""

    name: str
    op: str
    group: str
    ranks: int
    bytes: int
    estimate_ns: float | None  # None: nobody could estimate it
    source: str
    hidden_before_ns: float
    exposed_before_ns: float
    hidden_after_ns: float
    exposed_after_ns: float
    moves: int
    limit: str  # why it was not hidden further
    origin: str = ""
    causes: tuple[str, ...] = ()  # the names of the `passes.reasons.Reason`s that `limit` puts in words


@dataclass(frozen=True, slots=True)
class PassRow:
    """One pass that ran: how long it took and why it did what it did, by node."""

    name: str
    seconds: float
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """A simulated order: when the last resource is done, and what ran where."""

    step_ns: float
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """A graph as it ran: medians over `runs`. Communication includes the time that ranks waited for each other."""

    runs: int
    step_ns: float  # from the first thing launched to the end of the last
    compute_ns: float
    comm_ns: float
    exposed_ns: float  # communication beside which no compute ran
    idle_ns: float
    nodes: Mapping[str, float] = field(default_factory=dict)  # node -> ns
    # node -> the share of its time in which communication (of a collective: compute) ran, too
    beside: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One compiled graph."""

    name: str
    schedule: str  # the final schedule in its text format
    before: Plan
    after: Plan
    lower_bound_ns: float  # no order of this graph can be faster
    peak_bytes: int
    incoming_peak_bytes: int  # before the passes
    budget_bytes: int | None = None
    collectives: tuple[CollectiveRow, ...] = ()
    memory: tuple[tuple[float, int], ...] = ()  # (time, live bytes) at every change, in the final order
    passes: tuple[PassRow, ...] = ()
    kernels: int = 0  # generated kernels launched in one run
    externs: int = 0  # library calls
    fallbacks: Mapping[str, int] = field(default_factory=dict)  # ops run eagerly for want of a lowering
    unknown: tuple[str, ...] = ()  # nodes nobody could estimate; the times above leave them out
    compile_seconds: float = 0.0
    captured: str = ""  # with cuda_graphs: how many parts are captured, and what is not and why
    tuned: str = ""  # with autotune: how many kernels were measured, and what other block sizes gain
    measured: Measured | None = None  # None: nobody measured it

    @property
    def exposed_before_ns(self) -> float:
        """Time that compute stands still for collectives in the incoming order."""
        return sum(row.exposed_before_ns for row in self.collectives)

    @property
    def exposed_after_ns(self) -> float:
        """The same in the final order."""
        return sum(row.exposed_after_ns for row in self.collectives)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GraphRecord:
        """The record whose `asdict` is `data`."""
        return cls(
            **{
                **data,
                "before": _plan(data["before"]),
                "after": _plan(data["after"]),
                "collectives": tuple(map(_collective, data["collectives"])),
                "memory": tuple((time_ns, size_bytes) for time_ns, size_bytes in data["memory"]),
                "passes": tuple(PassRow(**row) for row in data["passes"]),
                "unknown": tuple(data["unknown"]),
                "measured": Measured(**data["measured"]) if data.get("measured") else None,
            }
        )


def _collective(data: Mapping[str, Any]) -> CollectiveRow:
    return CollectiveRow(**{**data, "causes": tuple(data.get("causes", ()))})


def _plan(data: Mapping[str, Any]) -> Plan:
    return Plan(data["step_ns"], tuple(Span(**span) for span in data["spans"]))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Every graph that one process compiled, in the order of compilation."""

    rank: int = 0
    world_size: int = 1
    graphs: tuple[GraphRecord, ...] = ()
    measured_peak_bytes: int | None = None  # most that torch's allocator gave out while measuring; None: not a GPU


@dataclass(frozen=True, slots=True)
class Report:
    """The steps of one or more ranks; printing it gives the overlap table of the first."""

    steps: tuple[StepRecord, ...]

    def __str__(self) -> str:
        from overlapc.report.text import render

        return render(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the form that the name asks for; ConfigError for a name of no form.

        `*.html` a page, `trace*.json` a Perfetto trace, any other `*.json` this record (it loads again),
        `*schedule*.txt` the final schedules, any other `*.txt` the table.
        """
        target = Path(path)
        text = self._as(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.{os.getpid()}")
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
        except OSError as error:
            raise ConfigError(f"cannot write {target}: {error.strerror}") from None
        return target

    def _as(self, target: Path) -> str:
        from overlapc.report import html, text, trace

        if target.suffix == ".html":
            return html.render(self)
        if target.suffix == ".json":
            return trace.render(self) if target.stem.startswith("trace") else self.to_json()
        if target.suffix == ".txt":
            return text.schedules(self) if "schedule" in target.stem else text.render(self, all_rows=True) + "\n"
        raise ConfigError(f"{target.name}: a report saves as .html, trace.json, .json, schedule.txt or .txt")

    def to_json(self) -> str:
        """Text that `load` reads back to an equal report."""
        return json.dumps({"overlapc_record": FORMAT, "steps": [asdict(step) for step in self.steps]}) + "\n"


def load(path: str | os.PathLike[str]) -> Report:
    """The report in a `record.json`; ConfigError when the file is missing or something else."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} is not a record: it holds no JSON") from None
    if not isinstance(data, dict) or data.get("overlapc_record") != FORMAT:
        raise ConfigError(f"{path} is not a record of this version; save one with overlapc.report().save(...)")
    return Report(
        tuple(
            StepRecord(
                step["rank"],
                step["world_size"],
                tuple(map(GraphRecord.from_json, step["graphs"])),
                step.get("measured_peak_bytes"),
            )
            for step in data["steps"]
        )
    )


_graphs: list[GraphRecord] = []
_measured_peak_bytes: list[int] = []  # of the last measurement; empty before it


def add(graph: GraphRecord) -> None:
    """Remembers a compiled graph of this process. The backend calls it once for each compilation."""
    _graphs.append(graph)


def add_measured(report: Report) -> None:
    """Remembers what was measured of this process's graphs: `report` is its report with that filled in."""
    (step,) = report.steps
    _graphs[:] = step.graphs
    _measured_peak_bytes[:] = [] if step.measured_peak_bytes is None else [step.measured_peak_bytes]


def clear() -> None:
    """Forgets what this process compiled (`torch._dynamo.reset()` does not)."""
    _graphs.clear()
    _measured_peak_bytes.clear()


def report_of_process() -> Report:
    """Everything this process compiled so far; the rank is the one torchrun gave it."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    peak_bytes = _measured_peak_bytes[0] if _measured_peak_bytes else None
    return Report((StepRecord(rank, world_size, tuple(_graphs), peak_bytes),))


def gather(run_dir: Path) -> Report:
    """The report of all ranks that left a `rank*/record.json` in `run_dir`, by rank."""
    steps = [step for path in run_dir.glob("rank*/record.json") for step in load(path).steps]
    return Report(tuple(sorted(steps, key=lambda step: step.rank)))


class NothingCompiled(OverlapcError):
    """A report was asked for before the first compiled step ran."""
