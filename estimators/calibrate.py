"""Measures this machine's CPU and gloo over loopback, and keeps the profile.

    python -m overlapc.estimators.calibrate [FILE]      write the measured profile (default: print it)

Two processes, as two ranks of one host would, measure at the same time: copying, matmuls, the time of a
call, collectives of 64 KiB to 16 MiB, and how much a matmul and a gather slow each other. About ten seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import torch
import torch.distributed as dist

from overlapc.errors import OverlapcError
from overlapc.estimators.device import DeviceProfile, load_profile, profile_from_json

RANKS = 2
TIMEOUT_S = 120.0
_SIZES = (2**16, 2**18, 2**20, 2**22, 2**24)  # bytes by each collective's definition


class CalibrationError(OverlapcError):
    """The measuring processes failed or took too long."""


def profile_for(device_type: str, cache_dir: Path) -> DeviceProfile:
    """The profile to use on this machine when the user named none.

    CUDA devices use the one that was measured on H200s. CPUs are measured on first use and the numbers kept
    under `cache_dir`; the processes of one host wait for the first of them, so that all use the same. Where
    measuring is impossible the stored `cpu-gloo` default is used.
    """
    if device_type != "cpu":
        return load_profile("h200-nvlink")
    path = cache_dir / f"profile-cpu-gloo-{_machine_key()}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock", timeout=TIMEOUT_S + 30):
            if not path.is_file():
                text = json.dumps(measure(), indent=1)
                part = path.with_suffix(f".{os.getpid()}")
                part.write_text(text)
                part.replace(path)  # a reader sees all of it or nothing
        return load_profile(path)
    except (CalibrationError, OSError, filelock.Timeout):
        return load_profile("cpu-gloo")


def measure() -> dict[str, Any]:
    """A profile file's content, measured here and now with two processes. CalibrationError if they fail."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // RANKS))
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "overlapc.estimators.calibrate", "--worker", str(rank), folder],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            end = time.monotonic() + TIMEOUT_S
            for rank, worker in enumerate(workers):
                _, complaint = worker.communicate(timeout=max(1.0, end - time.monotonic()))
                if worker.returncode:
                    raise CalibrationError(f"measuring rank {rank} failed:\n{complaint[-2000:]}")
        except subprocess.TimeoutExpired:
            raise CalibrationError(f"measuring took longer than {TIMEOUT_S:.0f} s") from None
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
        data: dict[str, Any] = json.loads((Path(folder) / "profile.json").read_text())
    profile_from_json(data)  # fails here, not at the next reader, if a worker wrote nonsense
    return data


def _machine_key() -> str:
    """Changes with anything that makes old numbers wrong."""
    parts = (_cpu_name(), str(os.cpu_count()), torch.__version__, "1")  # last: version of what is measured
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())


def _seconds(call: Callable[[], Any], *, repeats: int = 7) -> float:
    """The median time of a call, after two to warm up."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _worker(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    origin = f"measured: 2 processes on {_cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}"
    values: dict[str, Any] = {}
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        a, b = torch.rand(512, 512).to(dtype), torch.rand(512, 512).to(dtype)
        dist.barrier()
        values[f"flops_per_s.{name}"] = 2 * 512**3 / _seconds(partial(torch.matmul, a, b))
    values["flops_per_s.vector"] = values["flops_per_s.fp32"] / 4
    source = torch.rand(2**23)  # 32 MiB: past the caches of most CPUs
    target = torch.empty_like(source)
    dist.barrier()
    values["memory_bytes_per_s"] = 2 * source.nbytes / _seconds(lambda: target.copy_(source))
    small = torch.rand(16)
    values["launch_ns"] = _seconds(lambda: [small.add(1.0) for _ in range(100)]) / 100 * 1e9
    tables = _tables()
    floor = min(points[0][1] for points in tables.values())
    largest_bytes, largest_ns = tables["all_gather"][-1]
    values["collective_floor_ns"] = floor
    values["host_link"] = {
        "bytes_per_s": largest_bytes * (RANKS - 1) / RANKS / max(largest_ns - floor, 1.0) * 1e9,
        "step_ns": floor / 4,
    }
    compute, collective = _contention()
    values["slowdowns"] = {"other": {"matmul": compute, "memory": compute}}
    values["collective_slowdown"] = collective
    values["synchronous"] = True
    values["ranks_per_host"] = 1024
    said = {
        "flops_per_s.vector": "derived: a quarter of fp32 matmuls",
        "synchronous": "compute runs on the launching thread",
        "ranks_per_host": "assumed: every rank over loopback",
        "host_link": f"bandwidth {origin}; step assumed: a quarter of the floor",
    }
    if rank == 0:
        data = {
            "name": "cpu-gloo",
            "origin": origin,
            "quantities": {key: {"value": v, "origin": said.get(key, origin)} for key, v in values.items()},
            "tables": [
                {"collective": name, "ranks": RANKS, "origin": origin, "points": points}
                for name, points in tables.items()
            ],
        }
        Path(folder, "profile.json").write_text(json.dumps(data))
    dist.barrier()
    dist.destroy_process_group()


def _tables() -> dict[str, list[tuple[int, float]]]:
    """(bytes by definition, ns) of each collective in fp32."""
    tables: dict[str, list[tuple[int, float]]] = {"all_gather": [], "reduce_scatter": [], "all_reduce": []}
    for size in _SIZES:
        whole, shard = torch.zeros(size // 4), torch.zeros(size // 4 // RANKS)
        calls: dict[str, Callable[[], Any]] = {
            "all_gather": partial(dist.all_gather_into_tensor, whole, shard),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, shard, whole),
            "all_reduce": partial(dist.all_reduce, whole),
        }
        for name, call in calls.items():
            dist.barrier()
            tables[name].append((size, _seconds(call) * 1e9))
    return tables


def _contention() -> tuple[float, float]:
    """(how much slower matmuls get beside a gather, and the gather beside matmuls); both at least 1."""
    whole, shard = torch.zeros(2**22), torch.zeros(2**22 // RANKS)
    a, b = torch.rand(256, 256), torch.rand(256, 256)
    dist.barrier()
    alone_s = _seconds(lambda: a @ b, repeats=50)
    gather_s = _seconds(lambda: dist.all_gather_into_tensor(whole, shard))
    matmul_s, beside_s = [], []
    for _ in range(5):
        dist.barrier()
        begin = time.perf_counter()
        work = dist.all_gather_into_tensor(whole, shard, async_op=True)
        count = 0
        while not work.is_completed():
            a @ b
            count += 1
        spent = time.perf_counter() - begin
        work.wait()
        beside_s.append(spent)
        if count:
            matmul_s.append(spent / count)
    compute = statistics.median(matmul_s) / alone_s if matmul_s else 1.0
    return max(1.0, compute), max(1.0, statistics.median(beside_s) / gather_s)


def main(arguments: list[str]) -> None:
    """Measure and write; or, started by `measure`, be one of its ranks."""
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
