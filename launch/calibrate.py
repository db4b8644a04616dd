"""`overlapc calibrate`: measures this machine on N ranks and writes a device profile.

All ranks measure their own compute, with a few kernels that overlapc generates, at the same time. Then they measure
collectives, and the contention between compute and collectives. The file holds medians over the ranks.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlapc.agreement.departures import RUN_DIR, rank_dir
from overlapc.documents import write_file
from overlapc.errors import ConfigError
from overlapc.estimators.calibration.effort import Effort
from overlapc.estimators.calibration.measure_machine import Measurement
from overlapc.estimators.calibration.quick_profile import (
    Derived,
    cpu_derived,
    cpu_origin,
    profile_document,
    with_copies,
)
from overlapc.estimators.profiles.profile_file import load_profile, profile_path
from overlapc.launch.calibrate_copies import copies
from overlapc.launch.calibrate_host import host_costs, kernel_launch_ns
from overlapc.launch.calibrate_kernels import gap_ns, generated
from overlapc.launch.torchrun import check_world
from overlapc.report.times import us
from overlapc.units import human_bytes

LIMIT_S = 420  # a rank that is not done by then prints its stack and exits


@dataclass(frozen=True)
class CalibrateConfig:
    """The arguments of `overlapc calibrate`."""

    nproc: int = 2
    device: str = "cpu"
    name: str = ""
    ranks_per_host: int = 0  # 0: as many as this machine has devices
    quick: bool = False  # only the sizes of the CPU profile that is measured on first use: seconds, not minutes
    copies_for: str = ""  # name or file of a profile to add times of copies to; nothing else is measured then

    def check(self) -> None:
        """Raise ConfigError for arguments that do not fit this machine."""
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"--device {self.device}: cpu or cuda")
        check_world(self.nproc, self.device)
        if self.copies_for:
            load_profile(self.copies_for)

    def effort(self) -> Effort:
        """Return the sizes to measure."""
        if self.quick:
            return dataclasses.replace(Effort.quick(), generated_bytes=[2**16])
        return Effort.gpu() if self.device == "cuda" else Effort.cpu()

    @property
    def profile_name(self) -> str:
        """The profile's name: the user's, else that of the profile that copies are added to, else the device's."""
        if self.name:
            return self.name
        if self.copies_for:
            return Path(self.copies_for).stem
        if self.device == "cpu":
            return "cpu-gloo"
        return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")


def work(cfg: CalibrateConfig, out: Path, run_dir: Path) -> None:
    """Measure on this rank; rank 0 writes `out`."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    if cfg.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if cfg.device == "cuda" else "gloo"
    bound = device if cfg.device == "cuda" else None
    dist.init_process_group(backend, timeout=timedelta(seconds=120), device_id=bound)
    try:
        measurement = Measurement(device, cfg.effort(), _say if rank == 0 else lambda _: None)
        if cfg.copies_for:
            measurement.warm_up()
            copies(measurement)
        else:
            measure(measurement)
        (rank_dir(run_dir, rank) / "measured.json").write_text(json.dumps(measurement.result()))
        dist.barrier()
    finally:
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
    if rank == 0:  # after `destroy_process_group`: no other rank waits for this one
        results = [json.loads((rank_dir(run_dir, each) / "measured.json").read_text()) for each in range(cfg.nproc)]
        if cfg.copies_for:
            stored = json.loads(profile_path(cfg.copies_for).read_text(encoding="utf-8"))
            document = with_copies({**stored, "name": cfg.profile_name}, origin(cfg), results)
        else:
            document = profile_document(cfg.profile_name, origin(cfg), results, derived(cfg))
        write_file(out, json.dumps(document, indent=1) + "\n")
        print(f"{summary(document)}\n\nwritten to {out}", flush=True)


def measure(measurement: Measurement) -> None:
    """Measure everything, in the same order on all ranks; collectives only if there are several ranks."""
    measurement.compute()
    generated(measurement)
    measurement.say("launches")
    kernel_ns, eager_ns = kernel_launch_ns(measurement.clock, measurement.device), measurement.quantities["launch_ns"]
    measurement.facts["host time of a generated kernel's launch, ns"] = kernel_ns
    measurement.facts["host time of an eager launch, ns"] = eager_ns
    measurement.quantities["launch_ns"] = (kernel_ns + eager_ns) / 2
    if measurement.clock.queued:
        measurement.quantities["kernel_gap_ns"] = gap_ns(measurement)
    if dist.get_world_size() > 1:
        dist.barrier()  # ranks generate kernels at different speeds
        measurement.communication()
        measurement.contention()
        copies(measurement)
        if measurement.clock.queued:
            measurement.say("host time of graphs")
            measurement.quantities["host"] = asdict(host_costs(measurement.clock, measurement.device, kernel_ns))


_began = time.monotonic()


def _say(what: str) -> None:
    print(f"[{time.monotonic() - _began:6.1f} s] {what}", file=sys.stderr, flush=True)


# --- the file


def origin(cfg: CalibrateConfig) -> str:
    """Return the machine, versions and date, which the profile states as the origin of every measured number."""
    if cfg.device == "cpu":
        return cpu_origin(cfg.nproc)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    nvls = ", NVLS off" if os.environ.get("NCCL_NVLS_ENABLE") == "0" else ""
    day = time.strftime("%Y-%m-%d")
    return (
        f"measured: {cfg.nproc} x {torch.cuda.get_device_name()} of one host{nvls}, torch {torch.__version__}, "
        f"NCCL {nccl}, medians over ranks, {day}"
    )


def derived(cfg: CalibrateConfig) -> Callable[[Mapping[str, Any]], Derived]:
    """Return a function that adds the quantities that are not measured, each with its source."""
    if cfg.device == "cpu":
        return cpu_derived
    hosts = cfg.ranks_per_host or torch.cuda.device_count()
    origin_of_hosts = "given" if cfg.ranks_per_host else "devices seen while measuring"

    def add(quantities: Mapping[str, Any]) -> Derived:
        bf16, fp32 = quantities["flops_per_s.bf16"], quantities["flops_per_s.fp32"]
        return {
            "flops_per_s.fp16": (bf16, "not measured: the tensor cores' rate is that of bf16"),
            "flops_per_s.tf32": (bf16 / 2, "not measured: half of bf16"),
            "flops_per_s.fp64": (fp32, "not measured: taken from fp32"),
            "flops_per_s.vector": (fp32, "derived: fp32 matmuls, which run on the same units"),
            "synchronous": (False, "a GPU runs asynchronously to its host"),
            "collectives_wait_for_kernels": (True, "seen on H200s: NCCL's kernels begin with a kernel's last wave"),
            "ranks_per_host": (hosts, origin_of_hosts),
            "network_link": (
                {"bytes_per_s": 50e9, "step_ns": 5000.0},
                "not measured: one 400 Gb/s network card per GPU",
            ),
        }

    return add


def summary(document: Mapping[str, Any]) -> str:
    """Return the main numbers of a profile as text for the terminal."""
    values = {key: entry["value"] for key, entry in document["quantities"].items()}
    lines = [f"profile {document['name']}: {document['origin']}"]
    lines += [f"{key[12:]:8} {values[key] / 1e12:8.3g} TFLOP/s" for key in values if key.startswith("flops_per_s.")]
    lines.append(f"{'copy':8} {values['memory_bytes_per_s'] / 1e9:8.3g} GB/s")
    lines.append(f"{'launch':8} {values['launch_ns'] / 1e3:8.2f} µs")
    for table in document["tables"]:
        shown = ", ".join(f"{human_bytes(size)} {us(ns)} µs" for size, ns in table["points"][::2])
        what = f"{table['collective']} {table.get('dtype', '')}".rstrip()
        lines.append(f"{what} on {table['ranks']} ranks: {shown}")
    for name, each in values.get("slowdowns", {}).items():
        beside = "communication" if name == "other" else name
        lines.append(
            f"compute overlapped with {beside} takes: "
            + ", ".join(f"{kind} {_factor(factor)}" for kind, factor in each.items())
        )
    return "\n".join(lines)


def _factor(value: float | Sequence[tuple[float, float]]) -> str:
    """Return a factor as text, or the range of the factors of a curve."""
    if isinstance(value, int | float):
        return f"{value:.2f}x"
    factors = [factor for _, factor in value]
    return f"{min(factors):.2f} to {max(factors):.2f}x"


def main(arguments: Sequence[str]) -> None:
    """Entry point of each rank; arguments: the CalibrateConfig as JSON, and the file to write."""
    work(CalibrateConfig(**json.loads(arguments[0])), Path(arguments[1]), Path(os.environ[RUN_DIR]))


if __name__ == "__main__":
    main(sys.argv[1:])
