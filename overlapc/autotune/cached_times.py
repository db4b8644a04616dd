"""Caches the times of tilings on disk: one entry per kernel, keyed by its text, the device and the Triton version."""

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


class CachedTimes:
    """The cached times of kernels, in ns, by the name of each tiling's source. A damaged entry counts as empty."""

    def __init__(self, cache_dir: Path, graph: LoweredGraph) -> None:
        self._cache = KernelCache(cache_dir, "tilings")
        self._graph = graph
        self._keys: dict[str, str] = {}

    def key(self, trial: Trial) -> str:
        """Return the cache key of a kernel's times. It contains the sizes of symbols, which sources do not."""
        if trial.name not in self._keys:
            sizes = [f"{symbol}={self._graph.hint(symbol)}" for symbol in trial.heuristic.sizes]
            names = [alternative.source.name for alternative in trial.first]
            machine = machine_of(trial.op.device)
            self._keys[trial.name] = content_key(machine, triton_version(), _prelude(), *names, *sizes)
        return self._keys[trial.name]

    def read(self, trial: Trial) -> dict[str, float]:
        """Return the times that earlier processes measured; empty if there are none."""
        text = self._cache.read(self.key(trial), _SUFFIX)
        if text is None:
            return {}
        try:
            found = {str(name): float(ns) for name, ns in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError):
            found = {}
        return found if all(math.isfinite(ns) and ns > 0 for ns in found.values()) else {}

    def write(self, trial: Trial, times: Mapping[str, float]) -> None:
        """Replace the entry, unless it already holds these times because another rank of this host wrote them."""
        if self.read(trial) == times:
            return
        try:
            self._cache.update(self.key(trial), _SUFFIX, lambda _: json.dumps(times))
        except ConfigError:  # a folder that cannot be written only means that the times are not cached
            return


@functools.cache
def _prelude() -> bytes:
    """Return the text of the prelude that every Triton kernel calls, which is not part of the kernels' texts."""
    return Path(__file__).parents[1].joinpath("runtime", "triton_prelude.py").read_bytes()
