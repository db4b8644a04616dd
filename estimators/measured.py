"""Library calls measured on this device, once for each shape, and stored on disk.

A call's key contains everything that determines its time: the op, and dtype, sizes and strides of its tensors. All
times are in one cache entry, whose key is the device and the versions of its libraries.

Calls are measured in short bursts, because these are repeatable: under load a GPU lowers its clock, by an amount that
depends on everything that ran in the last tenth of a second. The profile's `throttle` converts the time of a burst to
the time under full load.
"""

from __future__ import annotations

import json
import math
import time
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
    """A library call that can run by itself. `make` allocates the arguments and returns the call."""

    key: str
    device: torch.device
    make: Callable[[], Callable[[], object]]


class Times:
    """Times in ns by key, in one cache entry for all processes of a host; an unreadable entry counts as empty."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._name = f"{machine_of(device)}, in bursts"
        self._key = content_key(self._name)
        self._cache = KernelCache(folder, "measured")
        self._known = _times(self._cache.read(self._key, _SUFFIX))
        self._new: dict[str, float] = {}

    @property
    def path(self) -> Path:
        """The file that holds the times."""
        return self._cache.path(self._key, _SUFFIX)

    def get(self, key: str) -> float | None:
        return self._known.get(key)

    def put(self, key: str, ns: float) -> None:
        """Note a time, which `store` adds to the entry."""
        self._known[key] = self._new[key] = ns

    def store(self) -> None:
        """Add the noted times to the entry, which other processes may have changed. Do nothing if the folder is not
        writable.

        Writing takes milliseconds, in which the other ranks of the host wait, so this is done once for many times.
        """
        if self._new:
            try:
                self._cache.update(self._key, _SUFFIX, self._merged)
            except (ConfigError, ToolchainError):
                return
            self._new.clear()

    def _merged(self, stored: bytes | None) -> str | None:
        there = _times(stored)
        self._known |= there
        if self._new.keys() <= there.keys():  # another rank measured the same
            return None
        return json.dumps({"device": self._name, "ns": self._new | there}, indent=1)


def _times(stored: bytes | None) -> dict[str, float]:
    try:
        data = json.loads(stored or "")
        found = {str(key): float(ns) for key, ns in data["ns"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {key: ns for key, ns in found.items() if math.isfinite(ns) and ns > 0}


@dataclass(frozen=True)
class MeasuredCalls:
    """Estimates library calls by measuring each once for all processes, if `times` are stored afterwards.

    call_of: None if a call cannot run alone.
    """

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
    """Return the ns of one call on this device in a short burst; None if its arguments do not fit into memory."""
    clock, began_s = clock_for(call.device), time.perf_counter()
    try:
        run = call.make()
        return burst_ns(clock, run, idle_since_s=began_s) if clock.queued else compute_ns(clock, run)
    except torch.OutOfMemoryError:
        return None


def machine_of(device: torch.device) -> str:
    """Return the name of the device and the versions of its libraries, for which a measured time is valid."""
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
