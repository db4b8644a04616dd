"""One compiled graph as it is kept on disk: the printed wrapper, its kernels' sources and its record.

An entry is found by `graph_key`; what it holds is text (see `stored`), and the compiled kernels have entries of their
own. Ranks take an entry only if all of them have one with the same order of collectives (`CompiledGraph.order`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from overlapc.codegen import kernel as codegen
from overlapc.codegen.kernel import KernelSource
from overlapc.codegen.objects import Boxed, function_of, rebuild
from overlapc.documents import from_data
from overlapc.report.model import GraphRecord
from overlapc.runtime.cache import KernelCache
from overlapc.runtime.marks import switching
from overlapc.runtime.steps import STEPS
from overlapc.warm.fingerprint import NotCacheable
from overlapc.warm.stored import UNREADABLE, decode, encode

FORMAT = 2  # of an entry; entries of another format are not found
_SUFFIX = ".graph.json"
NAME = "GRAPHNAME"  # stands in wrappers for the graph's name, which counts up in a process


@dataclass(frozen=True)
class CompiledGraph:
    """What is left of a compilation: enough to run the graph and to report about it."""

    name: str
    wrapper: str  # Python source, with GRAPHNAME for the name
    marked: str  # the same with a profiler's mark around every node
    objects: Mapping[str, str]  # what the wrapper calls: name -> how to find it (`codegen.objects.rebuild`)
    constants: Mapping[str, str]  # name -> path of the attribute of the FX graph that holds it
    kernels: tuple[tuple[str, KernelSource], ...]  # device type and source, each kernel once
    counts: Mapping[str, int]  # what `counters["overlapc"]` says about it
    order: str  # hash of its collectives in order
    agreed: Any  # what ranks agreed on (an `overlapc.following.Agreed`); None for a graph that does not communicate
    record: GraphRecord

    def named(self, name: str) -> CompiledGraph:
        """The same graph under the name that it has in this process."""
        schedule = self.record.schedule.replace(f"schedule {self.name}", f"schedule {name}", 1)
        return dataclasses.replace(
            self, name=name, record=dataclasses.replace(self.record, name=name, schedule=schedule)
        )

    def text(self, name: str) -> str:
        """The wrapper of the graph that is called `name`."""
        return self.wrapper.replace(NAME, name)

    def bind(
        self,
        cache_dir: Path,
        objects: Mapping[str, Any] | None = None,
        gm: GraphModule | None = None,
        runs: Callable[[Mapping[str, Any]], Boxed] | None = None,
    ) -> Boxed:
        """The callable, its kernels compiled or loaded. `objects`: what is at hand already; else found again.

        runs: makes what is run instead of the wrapper, out of launchers by name; marks are in the wrapper only.
        """
        space = dict(objects) if objects is not None else {name: rebuild(text) for name, text in self.objects.items()}
        if objects is None:
            space.update((name, _attribute(gm, path)) for name, path in self.constants.items())
        by_device: dict[str, list[KernelSource]] = {}
        for device_type, source in self.kernels:
            by_device.setdefault(device_type, []).append(source)
        for device_type, sources in by_device.items():
            space.update(codegen.load(device_type, sources, cache_dir))
        plain = self._function(self.wrapper, "", space) if runs is None else runs(space)
        call = switching(plain, lambda: self._function(self.marked, " marked", space), STEPS.counter(self.name))
        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _function(self, source: str, what: str, space: Mapping[str, Any]) -> Boxed:
        return function_of(source.replace(NAME, self.name), f"<overlapc {self.name}{what}>", codegen.direct(space))


def find(key: str, cache_dir: Path) -> CompiledGraph | None:
    """The entry, or None when there is none that is whole and of this format."""
    text = _cache(cache_dir).read(key, _SUFFIX)
    if text is None:
        return None
    try:
        data = json.loads(text)
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        record = from_data(data.pop("record"), GraphRecord, "record")
        return CompiledGraph(record=record, **{name: decode(field) for name, field in data.items()})
    except UNREADABLE:
        _cache(cache_dir).drop(key, _SUFFIX)
        return None


def keep(key: str, graph: CompiledGraph, cache_dir: Path) -> None:
    """Writes the entry. NotCacheable when something in it has no text."""
    lost = sorted(name for name, text in graph.objects.items() if not text)
    if lost:
        raise NotCacheable(f"the wrapper calls {lost[0]}, which cannot be found again by name")
    fields = {
        field.name: encode(getattr(graph, field.name)) for field in dataclasses.fields(graph) if field.name != "record"
    }
    data = {"format": FORMAT, **fields, "record": dataclasses.asdict(graph.record)}
    text = json.dumps(data)
    _cache(cache_dir).put(key, _SUFFIX, text)


@lru_cache(None)
def _cache(root: Path) -> KernelCache:
    return KernelCache(root, "graphs")


def _attribute(gm: GraphModule | None, path: str) -> Any:
    held: Any = gm
    for part in path.split("."):
        held = getattr(held, part)
    return held
