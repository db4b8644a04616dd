"""Fits a device profile to measured records: reads their runs, and prints the result of the fit."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from overlapc.documents import read_text
from overlapc.errors import ConfigError
from overlapc.estimators.calibration.feedback import Feedback, ProfileChange, feed_back, provenance
from overlapc.estimators.calibration.observed import Run
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.profiles.profile_file import PROFILES, load_profile, profile_to_json
from overlapc.report.model import GraphRecord
from overlapc.report.parsed_schedules import schedule_of
from overlapc.report.record import gather, load

_SHOWN = 40  # number of changed parameters that are printed


def refine(profile: str, records: Sequence[Path]) -> tuple[Feedback, dict[str, Any]]:
    """Fit a profile (name or file) to measured records; return the result and the new profile's JSON document.

    Raise ConfigError if a record has no measurements, or if none of them improves the predictions.
    """
    base = load_profile(profile)
    runs = [run for path in records for run in runs_of(path)]
    feedback = feed_back(base, runs)
    if not feedback.changes:
        nodes = sum(len(run.measured_ns) for run in runs)
        raise ConfigError(
            f"{', '.join(path.name for path in records)}: none of {nodes} measured nodes improves the predictions of"
            f" {base.name}; fitting needs several nodes of the same kind and size"
        )
    return feedback, _document(profile, feedback, ", ".join(path.name for path in records))


def runs_of(path: Path) -> list[Run]:
    """Return the measured graphs of a record or of a run's folder; the same graph of several ranks becomes one run.

    A compute node gets the median time of the ranks, a collective the shortest: its longer times on other ranks include
    their waiting for the last rank to start it.
    """
    same: dict[tuple[str, str], list[GraphRecord]] = defaultdict(list)
    for step in (gather(path) if path.is_dir() else load(path)).steps:
        for graph in step.graphs:
            if graph.measured is not None and graph.measured.nodes:
                same[graph.name, graph.schedule].append(graph)
    if not same:
        raise ConfigError(f"{path} has no measured times; use a record of `overlapc demo --profile`")
    return [_run(graphs) for graphs in same.values()]


def _run(graphs: Sequence[GraphRecord]) -> Run:
    schedule = schedule_of(graphs[0])
    measured = [graph.measured for graph in graphs if graph.measured is not None]
    times: dict[str, float] = {}
    beside: dict[str, float] = {}
    for node in schedule.nodes:
        seen = [each.nodes[node.name] for each in measured if node.name in each.nodes]
        if seen:
            times[node.name] = median(seen) if node.comm is None else min(seen)
        shares = [each.beside[node.name] for each in measured if node.name in each.beside]
        if shares:
            beside[node.name] = median(shares)
    return Run(schedule, times, beside)


def _document(profile: str, feedback: Feedback, source: str) -> dict[str, Any]:
    """Return the profile's JSON document with the fitted values, and with a list of the changes in `fed_back`."""
    path = Path(profile) if profile.endswith(".json") else PROFILES / f"{profile}.json"
    document: dict[str, Any] = json.loads(read_text(path))
    new = profile_to_json(_with_origin(feedback, source))
    document.update(origin=new["origin"], tables=new["tables"], curves=new["curves"])
    if "slowdowns" in new["quantities"]:
        document["quantities"]["slowdowns"] = new["quantities"]["slowdowns"]
    document["fed_back"] = [*document.get("fed_back", ()), *provenance(feedback, source)]
    return document


def _with_origin(feedback: Feedback, source: str) -> DeviceProfile:
    profile = feedback.profile
    origins = {**profile.origins, "": f"{profile.origins.get('', '')}; {len(feedback.changes)} numbers from {source}"}
    fitted = sum(change.parameter.startswith("slowdowns.") for change in feedback.changes)
    if fitted:
        origins["slowdowns"] = f"{origins.get('slowdowns', 'not stated')}; {fitted} factors from {source}"
    return replace(profile, origins=origins)


def feedback_text(feedback: Feedback) -> str:
    """Return the changed parameters, with their numbers of nodes, and the errors before and after, as text."""
    shown = tabulate(
        [_cells(change) for change in feedback.changes[:_SHOWN]],
        ("parameter", "was", "is", "", "nodes"),
        colalign=("left", "right", "right", "right", "right"),
        disable_numparse=True,
    )
    lines = [shown]
    if len(feedback.changes) > _SHOWN:
        lines.append(f"... and {len(feedback.changes) - _SHOWN} more")
    lines.append("\nhalf of the nodes that were held out are predicted within:")
    for each in feedback.errors:
        lines.append(f"  {each.kind}: {each.before:.1%} before, {each.after:.1%} now ({each.nodes})")
    lines += [f"  {part}: unchanged, because fitting it does not improve predictions" for part in feedback.refused]
    return "\n".join(lines)


def _cells(change: ProfileChange) -> tuple[str, ...]:
    factor = f"x{change.after / change.before:.2f}" if change.before else ""
    was = "none" if change.before is None else f"{change.before:.4g}"
    return change.parameter, was, f"{change.after:.4g}", factor, str(change.nodes)
