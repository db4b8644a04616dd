"""Library calls measured on this device, once for each shape, and stored on disk.

A call's key says all that decides its time: the op, and dtype, sizes and strides of its tensors. The entry that keeps
it is found by the device and the versions of the libraries behind it.

Calls are measured in short bursts, which is repeatable: a GPU under load lowers its clock, when and how far depends on
all that ran in the last tenth of a second. What full load makes of a burst's time, the profile knows (`throttle`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from overlapc.errors import ConfigError, ToolchainError
from overlapc.estimators.calibration.clock import burst_ns, clock_for, compute_ns
from overlapc.estimators.contention import contender_of
from overlapc.estimators.device import IDEAL, DeviceProfile
from overlapc.estimators.profiles.processor import cpu_name
from overlapc.runtime.cache import KernelCache, content_key
from overlapc.schedule.model import Estimate, Kind, Node

_SUFFIX = ".json"


@dataclass(frozen=True)
class Call:
    """A library call that can be made by itself. make: allocates arguments and returns the call."""

    key: str
    device: torch.device
    make: Callable[[], Callable[[], object]]


class Times:
    """ns by key, in one entry of all processes of a host; an entry that cannot be read counts as empty."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._name = f"{machine_of(device)}, in bursts"
        self._key = content_key(self._name)
        self._cache = KernelCache(folder, "measured")
        self._known = _times(self._cache.read(self._key, _SUFFIX))

    @property
    def path(self) -> Path:
        """The file of the times."""
        return self._cache.path(self._key, _SUFFIX)

    def get(self, key: str) -> float | None:
        return self._known.get(key)

    def put(self, key: str, ns: float) -> None:
        """Stores a time beside those of other processes. If the folder cannot be written, nothing is stored."""
        self._known[key] = ns
        try:
            self._cache.update(self._key, _SUFFIX, self._with)
        except (ConfigError, ToolchainError):
            return

    def _with(self, kept: bytes | None) -> str:
        self._known = {**self._known, **_times(kept)}
        return json.dumps({"device": self._name, "ns": self._known}, indent=1)


def _times(kept: bytes | None) -> dict[str, float]:
    try:
        data = json.loads(kept or "")
        found = {str(key): float(ns) for key, ns in data["ns"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {key: ns for key, ns in found.items() if math.isfinite(ns) and ns > 0}


@dataclass(frozen=True)
class MeasuredCalls:
    """Estimates library calls that `call_of` can make separately, by measuring each once for all processes."""

    call_of: Callable[[Node], Call | None]
    times: Times
    profile: DeviceProfile = IDEAL
    name: str = "measured here"

    def estimate(self, node: Node) -> Estimate | None:
        if node.kind is not Kind.EXTERN:
            return None
        call = self.call_of(node)
        if call is None:
            return None
        ns = self.times.get(call.key)
        if ns is None:
            ns = measure(call)
            if ns is None:
                return None
            self.times.put(call.key, ns)
        kind, flops = contender_of(node).kind.value, 0 if node.work is None else node.work.flops
        return Estimate(ns * self.profile.throttled(kind, flops), self.name)


def measure(call: Call) -> float | None:
    """ns of one call on this device in a short burst; None where its arguments do not fit into memory."""
    clock = clock_for(call.device)
    try:
        run = call.make()
        return burst_ns(clock, run) if clock.queued else compute_ns(clock, run)
    except torch.OutOfMemoryError:
        return None


def machine_of(device: torch.device) -> str:
    """The device and the versions of its libraries, for which a measured time is valid."""
    return f"{_device_name(device)}, {_versions(device)}"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def _versions(device: torch.device) -> str:
    parts: Mapping[str, object] = {"torch": torch.__version__}
    if device.type == "cuda":
        parts = {**parts, "CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
    return ", ".join(f"{name} {version}" for name, version in parts.items())
