"""The record of compiled graphs: collected in this process, saved as JSON and in other formats, loaded anywhere.

The backend calls `add` after each compilation; `overlapc.report()` returns the `Report` of this process.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch.distributed as dist

from overlapc import documents
from overlapc.errors import ConfigError, OverlapcError
from overlapc.graph_names import forward_of
from overlapc.report.captures import CAPTURES
from overlapc.report.model import GraphRecord, StepRecord
from overlapc.runtime.steps import STEPS

FORMS = (".html", ".pftrace", ".json", ".txt")  # suffixes of the files that a report can be saved as
FORMAT = 1  # of record.json; incremented when code that reads the old format would misread the new one


@dataclass(frozen=True, slots=True)
class Report:
    """The step records of one or more ranks. `str()` of a report is the overlap table of the first rank."""

    steps: tuple[StepRecord, ...]

    def __str__(self) -> str:
        from overlapc.report.text import render  # imported late: compilation needs no renderer

        return render(self.steps)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report in the format that the file name selects, and return the path.

        `*.html`: a page; `*.pftrace`: a trace for Perfetto; `*.json`: the record, which `load` reads; `*schedule*.txt`:
        the final schedules; any other `*.txt`: the table. Raise ConfigError for any other name.
        """
        target = Path(path)
        documents.check_suffix(target, "a report", FORMS)
        documents.write_file(target, self._as(target))
        return target

    def _as(self, target: Path) -> str | bytes:
        from overlapc.report import html, saved_schedules, text, trace

        if target.suffix == ".html":
            return html.render(self.steps)
        if target.suffix == ".pftrace":
            return trace.render(self.steps)
        if target.suffix == ".json":
            return self.to_json()
        if "schedule" in target.stem:
            return saved_schedules.render(self.steps)
        return text.render(self.steps, all_rows=True) + "\n"

    def to_json(self) -> str:
        """Return the report as JSON, from which `load` builds an equal report."""
        return json.dumps({"overlapc_record": FORMAT, "steps": [asdict(step) for step in self.steps]}) + "\n"


class _Head(msgspec.Struct):
    overlapc_record: int = 0


class _Document(msgspec.Struct):
    overlapc_record: int
    steps: tuple[StepRecord, ...]


def load(path: str | os.PathLike[str]) -> Report:
    """Load a report from a `record.json`. Raise ConfigError if the file is missing or is not a record."""
    text = documents.read_text(path)
    head = documents.from_json(text, _Head, f"{path} is not a record")
    if head.overlapc_record != FORMAT:
        raise ConfigError(f"{path} is not a record of this version; save one with overlapc.report().save(...)")
    return Report(documents.from_json(text, _Document, f"{path} is not a valid record").steps)


_graphs: list[GraphRecord] = []
_measured_peak_bytes: list[int] = []  # of the last measurement; empty before it


def add(graph: GraphRecord) -> None:
    """Add a compiled graph to the record of this process. The backend calls this once for each compilation."""
    _graphs.append(graph)


def forward(name: str) -> GraphRecord | None:
    """Return the forward that belongs to the backward `name`; None for any other graph."""
    return next((graph for graph in reversed(_graphs) if graph.name == forward_of(name)), None)


def add_measured(report: Report) -> None:
    """Replace the record of this process by `report`, which is the same record with measured times."""
    (step,) = report.steps
    _graphs[:] = step.graphs
    _measured_peak_bytes[:] = [] if step.measured_peak_bytes is None else [step.measured_peak_bytes]


def clear() -> None:
    """Forget the graphs that this process compiled (`torch._dynamo.reset()` does not)."""
    _graphs.clear()
    STEPS.clear()
    CAPTURES.clear()
    _measured_peak_bytes.clear()


def report_of_process() -> Report:
    """Return the report of all graphs that this process compiled.

    Rank and world size are those of torch.distributed if it is initialized, else those of torchrun's environment.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    peak_bytes = _measured_peak_bytes[0] if _measured_peak_bytes else None
    step_s = STEPS.step_s()
    step = StepRecord(
        rank,
        world_size,
        tuple(_graphs),
        peak_bytes,
        STEPS.typical(),
        STEPS.seen,
        CAPTURES.captures(),
        CAPTURES.breaks(),
        CAPTURES.seconds(),
        None if step_s is None else step_s * 1e9,
        STEPS.tokens,
        STEPS.optimizer_bytes(),
    )
    return Report((step,))


def gather(run_dir: Path) -> Report:
    """Load the report of all ranks from the folder of a run, sorted by rank.

    The folder has a `rank*/record.json` for each rank (`overlapc demo`), or one `overlap.json` (`overlapc run`).
    """
    paths = list(run_dir.glob("rank*/record.json")) or list(run_dir.glob("overlap.json"))
    steps = [step for path in paths for step in load(path).steps]
    return Report(tuple(sorted(steps, key=lambda step: step.rank)))


class NothingCompiled(OverlapcError):
    """A report was requested before the first compiled step ran."""
