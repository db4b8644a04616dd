"""The result of compiling one graph, as text: enough to run the graph and to report about it.

`codegen.generated` creates it from generated code; `warm.cached_graph` writes it to disk and reads it again.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.fx import GraphModule

from overlapc.codegen import generators
from overlapc.codegen.generators import KernelSource
from overlapc.codegen.objects import Boxed, function_of, rebuild
from overlapc.report.model import GraphRecord
from overlapc.runtime.copies.layout import Layout
from overlapc.runtime.copies.pool import GraphCopies, StoredCopies
from overlapc.runtime.marks import switching
from overlapc.runtime.steps import STEPS, as_optimizer

NAME = "GRAPHNAME"  # placeholder in wrappers for the graph's name, which is numbered within a process


def order_hash(lines: Sequence[str], layouts: Mapping[str, Layout] = MappingProxyType({})) -> str:
    """Return the hash of the order of collectives (one a line) and of the pool layouts of copies, by group."""
    placed = [f"@{group} {layouts[group]}" for group in sorted(layouts)]
    return hashlib.sha256("\n".join([*lines, *placed]).encode()).hexdigest()


@dataclass(frozen=True)
class CompiledGraph:
    """The result of a compilation, as text: enough to run the graph and to report about it."""

    name: str
    wrapper: str  # Python source, with GRAPHNAME in place of the graph's name
    marked: str  # the same source with a profiler mark around every node
    objects: Mapping[str, str]  # objects that the wrapper calls: name -> text from which `codegen.objects` rebuilds it
    constants: Mapping[str, str]  # name -> path of the attribute of the FX graph that holds it
    kernels: tuple[tuple[str, KernelSource], ...]  # device type and source, each kernel once
    counts: Mapping[str, int]  # increments of `counters["overlapc"]`
    order: str  # hash of the order of its collectives
    copies: tuple[StoredCopies, ...]  # collectives by copies; all ranks must reopen them together
    divided: tuple[Any, ...]  # groups across hosts (`planning.host_groups.DividedGroup`), split before `copies`
    agreed: Any  # what ranks agreed on (`planning.agreed.Agreed`); None for a graph that does not communicate
    record: GraphRecord

    def named(self, name: str) -> CompiledGraph:
        """Return this graph under the name that it has in this process."""
        schedule = self.record.schedule.replace(f"schedule {self.name}", f"schedule {name}", 1)
        return dataclasses.replace(
            self, name=name, record=dataclasses.replace(self.record, name=name, schedule=schedule)
        )

    def text(self, name: str) -> str:
        """Return the wrapper's source for a graph called `name`."""
        return self.wrapper.replace(NAME, name)

    def function(
        self,
        cache_dir: Path,
        objects: Mapping[str, Any] | None = None,
        gm: GraphModule | None = None,
        runs: Callable[[Mapping[str, Any]], Boxed] | None = None,
        copies: Mapping[str, GraphCopies] = MappingProxyType({}),
    ) -> Boxed:
        """Return the callable, after compiling or loading its kernels.

        objects: the objects that the wrapper calls, if the caller has them; None rebuilds them from their texts.
        gm: the FX graph that holds the constants; needed only without `objects`.
        copies: the reopened copies, by group.
        runs: builds the callable from launchers by name, in place of the wrapper; profiler marks still use the wrapper.
        """
        if objects is not None:
            space = dict(objects)
        else:
            space = {name: rebuild(text, copies) for name, text in self.objects.items()}
            space.update((name, _attribute(gm, path)) for name, path in self.constants.items())
        by_device: dict[str, list[KernelSource]] = {}
        for device_type, source in self.kernels:
            by_device.setdefault(device_type, []).append(source)
        for device_type, sources in by_device.items():
            space.update(generators.load(device_type, sources, cache_dir))
        plain = self._function(self.wrapper, "", space) if runs is None else runs(space)
        call = switching(plain, lambda: self._function(self.marked, " marked", space), STEPS.counter(self.name))
        if self.record.infers and self.record.changes_inputs:
            call = as_optimizer(call)
        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _function(self, source: str, what: str, space: Mapping[str, Any]) -> Boxed:
        return function_of(source.replace(NAME, self.name), f"<overlapc {self.name}{what}>", generators.direct(space))


def _attribute(gm: GraphModule | None, path: str) -> Any:
    held: Any = gm
    for part in path.split("."):
        held = getattr(held, part)
    return held
