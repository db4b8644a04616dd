"""`overlapc doctor`: what this machine has, which parts of it overlapc would use, and what would be slow, and why."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from overlapc.config import Config
from overlapc.errors import ToolchainError
from overlapc.estimators.calibration.effort import Effort
from overlapc.estimators.calibration.measure_machine import Measurement
from overlapc.estimators.calibration.workloads import DTYPES
from overlapc.estimators.device import DeviceProfile
from overlapc.launch.torchrun import cpus
from overlapc.planning.chosen_profile import profile_of
from overlapc.runtime.cache import refusal
from overlapc.runtime.toolchain import find_compiler
from overlapc.units import human_bytes

FAR = 0.20  # of what the profile says: a machine that is further off is worth measuring
_FULL_BYTES = 2**30  # left on a disk: less than that is soon full of kernels


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at; `hint` says what to do where something is wrong or would be slow."""

    what: str
    found: str
    hint: str = ""


def examine(config: Config) -> Iterator[Finding]:
    """Everything, one after the other; measures some seconds at the end."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    yield compiler(device)
    yield from gpus()
    yield from libraries()
    yield cache(config)
    profile = profile_of(config, {device.type})
    named = "named by an option" if config.profile is not None else "this machine's default"
    yield Finding("profile", f"{profile.name}, {named}: {profile.origins.get('', 'not stated')}")
    yield from measured(device, profile)


def compiler(device: torch.device) -> Finding:
    """The C++ compiler: CPU kernels need it, GPU launches are faster with it."""
    try:
        return Finding("C++ compiler", " ".join(find_compiler().command))
    except ToolchainError as error:
        slow = "launches go through Python, which costs the host more" if device.type == "cuda" else str(error)
        return Finding("C++ compiler", "none", f"{slow}: install g++")


def gpus() -> Iterator[Finding]:
    """Each device, and which of them reach each other's memory."""
    count = torch.cuda.device_count()
    if not count:
        cores = cpus()
        slow = "collectives of gloo and compute share a core" if cores < 2 else ""
        yield Finding("devices", f"no GPU; {cores} cores, {torch.get_num_threads()} threads", slow)
        return
    for number in range(count):
        about = torch.cuda.get_device_properties(number)
        yield Finding(f"GPU {number}", f"{about.name}, {human_bytes(about.total_memory)}")
    apart = [
        (a, b) for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if count > 1 and not apart:
        yield Finding("peer access", f"all {count} GPUs reach each other's memory")
    if apart:
        pairs = ", ".join(f"{a} to {b}" for a, b in apart[:4]) + (" ..." if len(apart) > 4 else "")
        yield Finding(
            "peer access", f"not from {pairs}", "transport=copy cannot serve them; collectives go through the host"
        )


def libraries() -> Iterator[Finding]:
    """The libraries for collectives."""
    if torch.cuda.is_available() and dist.is_nccl_available():
        yield Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    elif torch.cuda.is_available():
        yield Finding(
            "NCCL", "not in this build of torch", "GPUs of one job talk through gloo: install torch with NCCL"
        )
    else:
        have = dist.is_available() and dist.is_gloo_available()
        yield Finding("gloo", "there" if have else "not in this build of torch", "" if have else "no ranks on the CPU")


def cache(config: Config) -> Finding:
    """The folder of kernels and compiled steps: whether it will be used."""
    folder = config.cache_dir
    if not folder.exists():
        return Finding("cache", f"{folder}, not made yet")
    refused = refusal(folder)
    if refused is not None:
        return Finding("cache", f"{folder} is not used", refused)
    if not os.access(folder, os.W_OK):
        return Finding("cache", f"{folder}, read only", "each process compiles what is not in it, and keeps nothing")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    hint = "the disk is almost full: processes would keep what they compile to themselves" if free < _FULL_BYTES else ""
    return Finding("cache", f"{folder}: {human_bytes(size)}, {human_bytes(free)} free", hint)


def measured(device: torch.device, profile: DeviceProfile) -> Iterator[Finding]:
    """How far this machine is from the profile, by a product and a copy as `overlapc calibrate` measures them."""
    effort, dtype = (Effort.gpu(), "bf16") if device.type == "cuda" else (Effort.quick(), "fp32")
    measurement = Measurement(device, effort)
    measurement.warm_up()
    torch_dtype = DTYPES[dtype]
    flops, reached = measurement.matmul_rate(effort.matmuls[dtype][-1], torch_dtype)
    promised = profile.curve_rate("matmul", str(torch_dtype), flops) or profile.rate(str(torch_dtype))
    yield compared("matrix products", reached, promised, 1e12, "TFLOP/s")
    reached = measurement.copy_rate(effort.copy_bytes)
    yield compared("copies in memory", reached, profile.memory_bytes_per_s, 1e9, "GB/s")


def compared(what: str, reached: float, promised: float | None, unit: float, name: str) -> Finding:
    """A measured rate compared with the profile's."""
    if promised is None:
        return Finding(what, f"{reached / unit:.3g} {name}; the profile does not know it", "overlapc calibrate")
    off = reached / promised - 1
    found = f"{reached / unit:.3g} {name}, {off:+.0%} from the profile's {promised / unit:.3g}"
    slow = "another machine, or a busy one: overlapc calibrate --out my.json measures it, profile=my.json uses that"
    return Finding(what, found, slow if abs(off) > FAR else "")
