"""Times of tilings on disk: one entry for each kernel, by its text, the device and the versions of the compilers."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path

from overlapc.autotune.search import Trial
from overlapc.errors import ConfigError
from overlapc.estimators.measured import machine_of
from overlapc.ir.ops import LoweredGraph
from overlapc.runtime.cache import KernelCache, content_key
from overlapc.runtime.toolchain import triton_version

_SUFFIX = ".tilings.json"


class KeptTimes:
    """ns of each tiling of a kernel by the name of its source; what is damaged or something else counts as empty."""

    def __init__(self, cache_dir: Path, graph: LoweredGraph) -> None:
        self._cache = KernelCache(cache_dir, "tilings")
        self._graph = graph
        self._keys: dict[str, str] = {}

    def key(self, trial: Trial) -> str:
        """Cache key of the times of a kernel's tilings; sources contain all sizes but those of symbols."""
        if trial.name not in self._keys:
            sizes = [f"{symbol}={self._graph.hint(symbol)}" for symbol in trial.heuristic.sizes]
            names = [each.source.name for each in trial.first]
            machine = machine_of(trial.op.device)
            self._keys[trial.name] = content_key(machine, triton_version(), _prelude(), *names, *sizes)
        return self._keys[trial.name]

    def read(self, trial: Trial) -> dict[str, float]:
        """The times that earlier processes measured."""
        text = self._cache.read(self.key(trial), _SUFFIX)
        if text is None:
            return {}
        try:
            found = {str(name): float(ns) for name, ns in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError):
            found = {}
        return found if all(math.isfinite(ns) and ns > 0 for ns in found.values()) else {}

    def write(self, trial: Trial, times: Mapping[str, float]) -> None:
        """Replaces the entry, unless another rank of this host has."""
        if self.read(trial) == times:
            return
        try:
            self._cache.update(self.key(trial), _SUFFIX, lambda _: json.dumps(times))
        except ConfigError:  # a folder that cannot be written costs only the keeping
            return


@functools.cache
def _prelude() -> bytes:
    """Text of the prelude that every Triton kernel calls, and which is not part of their texts."""
    return Path(__file__).parents[1].joinpath("runtime", "triton_prelude.py").read_bytes()
