"""The result of compiling one graph, as text: enough to run the graph and to report about it.

Generated code is printed into it (`codegen.generated`); `warm.cached_graph` writes it to disk and reads it again.
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
from overlapc.runtime.copies.pool import GraphCopies, KeptCopies
from overlapc.runtime.marks import switching
from overlapc.runtime.steps import STEPS, as_optimizer

NAME = "GRAPHNAME"  # stands in wrappers for the graph's name, which counts up in a process


def order_hash(lines: Sequence[str], layouts: Mapping[str, Layout] = MappingProxyType({})) -> str:
    """Hash of the order of collectives (one a line) and of each pool's layout for copies, stored with a graph."""
    placed = [f"@{group} {layouts[group]}" for group in sorted(layouts)]
    return hashlib.sha256("\n".join([*lines, *placed]).encode()).hexdigest()


@dataclass(frozen=True)
class CompiledGraph:
    """The result of a compilation, as text: enough to run the graph and to report about it."""

    name: str
    wrapper: str  # Python source, with GRAPHNAME for the name
    marked: str  # the same with a profiler's mark around every node
    objects: Mapping[str, str]  # what the wrapper calls: name -> how to find it (`codegen.objects.rebuild`)
    constants: Mapping[str, str]  # name -> path of the attribute of the FX graph that holds it
    kernels: tuple[tuple[str, KernelSource], ...]  # device type and source, each kernel once
    counts: Mapping[str, int]  # its counts for `counters["overlapc"]`
    order: str  # hash of its collectives in order
    copies: tuple[KeptCopies, ...]  # collectives by copies, which all ranks open again together
    divided: tuple[Any, ...]  # groups of several hosts (`planning.host_groups.DividedGroup`), divided before these
    agreed: Any  # what ranks agreed on (`planning.agreed.Agreed`); None for a graph that does not communicate
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

    def function(
        self,
        cache_dir: Path,
        objects: Mapping[str, Any] | None = None,
        gm: GraphModule | None = None,
        runs: Callable[[Mapping[str, Any]], Boxed] | None = None,
        copies: Mapping[str, GraphCopies] = MappingProxyType({}),
    ) -> Boxed:
        """The callable, its kernels compiled or loaded. `objects`: what is at hand already; else found again.

        copies: those of `copies` opened again, by group.
        runs: makes what is run instead of the wrapper, out of launchers by name; marks are in the wrapper only.
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
