"""The record of what was compiled: kept by this process, saved to JSON and other forms, loaded in any process.

The backend calls `add` after each compilation; `overlapc.report()` gives back the `Report` of this process.
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
from overlapc.report.captures import CAPTURES
from overlapc.report.held_memory import forward_of, inputs
from overlapc.report.model import GraphRecord, StepRecord
from overlapc.runtime.steps import STEPS
from overlapc.schedule.model import Buffer

FORMAT = 1  # of record.json; raised when a reader of the old one would misread the new one


@dataclass(frozen=True, slots=True)
class Report:
    """The steps of one or more ranks; printing it gives the overlap table of the first."""

    steps: tuple[StepRecord, ...]

    def __str__(self) -> str:
        from overlapc.report.text import render  # now: to compile a step needs no renderer

        return render(self.steps)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the form that the name asks for; ConfigError for a name of no form.

        `*.html` a page, `*.pftrace` a trace for Perfetto, `*.json` this record (it loads again), `*schedule*.txt` the
        final schedules, any other `*.txt` the table.
        """
        target = Path(path)
        content = self._as(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.{os.getpid()}")
            partial.write_bytes(content if isinstance(content, bytes) else content.encode())
            partial.replace(target)
        except OSError as error:
            raise ConfigError(f"cannot write {target}: {error.strerror}") from None
        return target

    def _as(self, target: Path) -> str | bytes:
        from overlapc.report import html, saved_schedules, text, trace

        if target.suffix == ".html":
            return html.render(self.steps)
        if target.suffix == ".pftrace":
            return trace.render(self.steps)
        if target.suffix == ".json":
            return self.to_json()
        if target.suffix == ".txt" and "schedule" in target.stem:
            return saved_schedules.render(self.steps)
        if target.suffix == ".txt":
            return text.render(self.steps, all_rows=True) + "\n"
        raise ConfigError(f"{target.name}: a report saves as .html, .pftrace, .json, schedule.txt or .txt")

    def to_json(self) -> str:
        """Text that `load` reads back to an equal report."""
        return json.dumps({"overlapc_record": FORMAT, "steps": [asdict(step) for step in self.steps]}) + "\n"


class _Head(msgspec.Struct):
    overlapc_record: int = 0


class _Document(msgspec.Struct):
    overlapc_record: int
    steps: tuple[StepRecord, ...]


def load(path: str | os.PathLike[str]) -> Report:
    """The report in a `record.json`; ConfigError when the file is missing or something else."""
    text = documents.read_text(path)
    head = documents.from_json(text, _Head, f"{path} is not a record")
    if head.overlapc_record != FORMAT:
        raise ConfigError(f"{path} is not a record of this version; save one with overlapc.report().save(...)")
    return Report(documents.from_json(text, _Document, f"{path} is not a record as overlapc writes it").steps)


_graphs: list[GraphRecord] = []
_measured_peak_bytes: list[int] = []  # of the last measurement; empty before it


def add(graph: GraphRecord) -> None:
    """Remembers a compiled graph of this process. The backend calls it once for each compilation."""
    _graphs.append(graph)


def given_to_forward(name: str) -> dict[str, Buffer]:
    """What the forward that belongs to the backward called `name` was given; nothing for any other graph."""
    forward = next((graph for graph in reversed(_graphs) if graph.name == forward_of(name)), None)
    return {} if forward is None else inputs(forward)


def add_measured(report: Report) -> None:
    """Remembers what was measured of this process's graphs: `report` is its report with that filled in."""
    (step,) = report.steps
    _graphs[:] = step.graphs
    _measured_peak_bytes[:] = [] if step.measured_peak_bytes is None else [step.measured_peak_bytes]


def clear() -> None:
    """Forgets what this process compiled (`torch._dynamo.reset()` does not)."""
    _graphs.clear()
    STEPS.clear()
    CAPTURES.clear()
    _measured_peak_bytes.clear()


def report_of_process() -> Report:
    """Everything this process compiled so far; the rank is that of its process group, else the one torchrun gave it."""
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
    """The report of all ranks in the folder of a run, by rank: a `rank*/record.json` each (`overlapc demo`), or one
    `overlap.json` (`overlapc run`)."""
    paths = list(run_dir.glob("rank*/record.json")) or list(run_dir.glob("overlap.json"))
    steps = [step for path in paths for step in load(path).steps]
    return Report(tuple(sorted(steps, key=lambda step: step.rank)))


class NothingCompiled(OverlapcError):
    """A report was asked for before the first compiled step ran."""
