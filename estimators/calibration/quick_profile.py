"""Measures a CPU's profile on first use, and builds the content of profile files from measurements.

    python -m overlapc.estimators.calibration.quick_profile [FILE]      write the quick CPU profile (default: print it)

Two processes measure at the same time, like two ranks of one host, for about ten seconds (see measure_machine.py).
`overlapc calibrate` measures more, on CPUs and on GPUs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlapc.errors import CalibrationError
from overlapc.estimators.calibration.effort import MEASURING_S, Effort
from overlapc.estimators.calibration.fit import fit, fit_copies
from overlapc.estimators.calibration.measure_machine import Measurement
from overlapc.estimators.profiles.processor import cpu_name
from overlapc.estimators.profiles.profile_file import FORMAT, link_to_json, profile_from_json, table_from_json
from overlapc.schedule.collective_kinds import COPY

Derived = dict[str, tuple[Any, str]]  # quantity -> (value, origin)
RANKS = 2


def measure() -> dict[str, Any]:
    """Measure this CPU with two processes and return a profile file's content. Raise CalibrationError on failure."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // RANKS))
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "overlapc.estimators.calibration.quick_profile", "--worker", str(rank), folder],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            end = time.monotonic() + MEASURING_S
            for rank, worker in enumerate(workers):
                _, complaint = worker.communicate(timeout=max(1.0, end - time.monotonic()))
                if worker.returncode:
                    raise CalibrationError(f"measuring rank {rank} failed:\n{complaint[-2000:]}")
        except subprocess.TimeoutExpired:
            raise CalibrationError(f"measuring took longer than {MEASURING_S:.0f} s") from None
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
        data: dict[str, Any] = json.loads((Path(folder) / "profile.json").read_text())
    return data


def profile_document(
    name: str, origin: str, ranks: Sequence[Mapping[str, Any]], derived: Callable[[Mapping[str, Any]], Derived]
) -> dict[str, Any]:
    """Return a profile file's content from the results of all ranks (`Measurement.result`), as medians over the ranks.

    Except for the clock under load, where the lowest clock counts: GPUs of one kind differ in it by a few percent, and
    a step waits for the slowest. `derived` computes, from the measured quantities, further ones with their origins.
    """
    measured = median_of(list(ranks))
    if "clock_by_utilization" in measured["quantities"]:
        measured["quantities"]["clock_by_utilization"] = median_of(
            [rank["quantities"]["clock_by_utilization"] for rank in ranks], max
        )
    quantities = {key: {"value": value, "origin": origin} for key, value in measured["quantities"].items()}
    for key, (value, derivation) in derived(measured["quantities"]).items():
        quantities.setdefault(key, {"value": value, "origin": derivation})
    if measured["tables"]:
        tables = [table_from_json(table) for table in measured["tables"]]
        by_copies = [table for table in tables if table.collective.endswith(f" via {COPY}")]
        found = fit([table for table in tables if table not in by_copies])
        fitted = f"fitted to the tables of collectives, {origin}"
        quantities["collective_floor_ns"] = {"value": found.floor_ns, "origin": fitted}
        quantities["host_link"] = {"value": link_to_json(found.link), "origin": fitted}
        if by_copies:
            quantities["copy_link"] = {"value": link_to_json(fit_copies(by_copies)), "origin": fitted}
    document = {
        "name": name,
        "origin": origin,
        "overlapc_profile": FORMAT,
        "quantities": quantities,
        "tables": [{**table, "origin": origin} for table in measured["tables"]],
        "curves": [
            {"curve": curve, "origin": origin, "points": points} for curve, points in measured["curves"].items()
        ],
        "facts": measured["facts"],
    }
    profile_from_json(document)  # raises here, not at the next reader, if a measured value is out of range
    return document


def with_copies(document: dict[str, Any], origin: str, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a profile file's content with the measurements of copies between `ranks` in it.

    They replace those of as many ranks; tables of fewer or more ranks stay, and the link is fitted to all.
    """
    measured = median_of(list(ranks))
    slowdowns = dict(document["quantities"].get("slowdowns", {"value": {}, "origin": ""}))
    slowdowns["value"] = {**slowdowns["value"], **measured["quantities"].get("slowdowns", {})}
    slowdowns["origin"] = f"{slowdowns['origin'].partition('; copies: ')[0]}; copies: {origin}"
    replaced = {(table["collective"], table["ranks"]) for table in measured["tables"]}
    kept = [table for table in document["tables"] if (table["collective"], table["ranks"]) not in replaced]
    tables = [*kept, *({**table, "origin": origin} for table in measured["tables"])]
    link = fit_copies([table_from_json(table) for table in tables if table["collective"].endswith(f" via {COPY}")])
    found = {
        **document,
        "quantities": {
            **document["quantities"],
            "slowdowns": slowdowns,
            "copy_link": {"value": link_to_json(link), "origin": f"fitted to the tables of copies, {origin}"},
        },
        "tables": tables,
        "facts": {**document.get("facts", {}), **measured["facts"]},
    }
    profile_from_json(found)
    return found


def median_of(values: Sequence[Any], of: Callable[[Sequence[float]], float] = statistics.median) -> Any:
    """Combine JSON data of equal structure: floats become their median (or `of` them); other values must be equal."""
    first = values[0]
    if isinstance(first, dict):
        return {key: median_of([value[key] for value in values], of) for key in first}
    if isinstance(first, list):
        return [median_of(items, of) for items in zip(*values, strict=True)]
    return of(values) if isinstance(first, float) else first


def cpu_origin(ranks: int) -> str:
    """Return the origin of a measured CPU profile's numbers."""
    return f"measured: {ranks} processes on {cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}"


def cpu_derived(quantities: Mapping[str, Any]) -> Derived:
    """Return the quantities of a CPU profile that are not measured."""
    return {
        "flops_per_s.vector": (quantities["flops_per_s.fp32"] / 4, "derived: a quarter of fp32 matmuls"),
        "synchronous": (True, "compute runs on the launching thread"),
        "ranks_per_host": (1024, "assumed: every rank over loopback"),
    }


def _worker(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    measurement = Measurement(torch.device("cpu"), Effort.quick())
    measurement.compute()
    measurement.communication()
    measurement.contention()
    results: list[Any] = [None] * RANKS
    dist.all_gather_object(results, measurement.result())
    if rank == 0:
        document = profile_document("cpu-gloo", cpu_origin(RANKS), results, cpu_derived)
        Path(folder, "profile.json").write_text(json.dumps(document))
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Measure and write the profile, or run as one of the ranks that `measure` starts (`--worker`)."""
    if arguments[:1] == ["--worker"]:
        _worker(int(arguments[1]), arguments[2])
        return
    text = json.dumps(measure(), indent=1) + "\n"
    if arguments:
        Path(arguments[0]).write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
