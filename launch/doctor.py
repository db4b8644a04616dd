"""`overlapc doctor`: checks what this machine has, what overlapc would use of it, and what would be slow and why."""

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

FAR = 0.20  # relative difference from the profile above which measuring the machine is worthwhile
_FULL_BYTES = 2**30  # free bytes below which kernels will soon fill the disk


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `hint` says what to do if something is wrong or would be slow."""

    what: str
    found: str
    hint: str = ""


def examine(config: Config) -> Iterator[Finding]:
    """Run all checks one after the other; the last ones measure for some seconds."""
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
    """Check the C++ compiler: CPU kernels need it, GPU launches are faster with it."""
    try:
        return Finding("C++ compiler", " ".join(find_compiler().command))
    except ToolchainError as error:
        slow = "kernels are launched from Python, which takes more host time" if device.type == "cuda" else str(error)
        return Finding("C++ compiler", "none", f"{slow}: install g++")


def gpus() -> Iterator[Finding]:
    """Check the devices, and which of them can access each other's memory."""
    count = torch.cuda.device_count()
    if not count:
        cores = cpus()
        slow = "gloo's collectives and compute share one core" if cores < 2 else ""
        yield Finding("devices", f"no GPU; {cores} cores, {torch.get_num_threads()} threads", slow)
        return
    for number in range(count):
        about = torch.cuda.get_device_properties(number)
        yield Finding(f"GPU {number}", f"{about.name}, {human_bytes(about.total_memory)}")
    apart = [
        (a, b) for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if count > 1 and not apart:
        yield Finding("peer access", f"all {count} GPUs can access each other's memory")
    if apart:
        pairs = ", ".join(f"{a} to {b}" for a, b in apart[:4]) + (" ..." if len(apart) > 4 else "")
        yield Finding(
            "peer access",
            f"missing from {pairs}",
            "transport=copy cannot be used between them; collectives go through host memory",
        )


def libraries() -> Iterator[Finding]:
    """Check the libraries for collectives."""
    if torch.cuda.is_available() and dist.is_nccl_available():
        yield Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    elif torch.cuda.is_available():
        yield Finding(
            "NCCL", "not in this build of torch", "collectives of GPUs use gloo, which is slow: install torch with NCCL"
        )
    else:
        have = dist.is_available() and dist.is_gloo_available()
        found, hint = ("available", "") if have else ("not in this build of torch", "ranks on the CPU cannot be used")
        yield Finding("gloo", found, hint)


def cache(config: Config) -> Finding:
    """Check whether the folder of compiled kernels and steps will be used."""
    folder = config.cache_dir
    if not os.path.exists(folder):  # unlike Path.exists, False below a folder that this user cannot read
        above = next(parent for parent in folder.absolute().parents if os.path.exists(parent))
        if os.access(above, os.W_OK) and above.is_dir():
            return Finding("cache", f"{folder}, not created yet")
        hint = "each process compiles for itself: set OVERLAPC_CACHE_DIR to a folder of your own"
        return Finding("cache", f"{folder} cannot be created in {above}", hint)
    refused = refusal(folder)
    if refused is not None:
        return Finding("cache", f"{folder} is not used", refused)
    if not os.access(folder, os.W_OK):
        return Finding("cache", f"{folder}, read only", "code that is not in it is compiled again by each process")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    hint = "the disk is almost full: newly compiled code may not be cached" if free < _FULL_BYTES else ""
    return Finding("cache", f"{folder}: {human_bytes(size)}, {human_bytes(free)} free", hint)


def measured(device: torch.device, profile: DeviceProfile) -> Iterator[Finding]:
    """Compare this machine with the profile, by a matrix product and a copy as `overlapc calibrate` measures them."""
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
    """Return the finding about a measured rate (`reached`) and the profile's (`promised`)."""
    if promised is None:
        return Finding(what, f"{reached / unit:.3g} {name}; not in the profile", "overlapc calibrate measures it")
    off = reached / promised - 1
    found = f"{reached / unit:.3g} {name}, {off:+.0%} from the profile's {promised / unit:.3g}"
    hint = (
        "this machine differs from the profile's, or is busy: if it is idle, run `overlapc calibrate --out my.json` and"
        " set profile=my.json"
    )
    return Finding(what, found, hint if abs(off) > FAR else "")
