"""Prints a program into a CompiledGraph, which can be cached: the wrapper's source, kernel sources and the record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from overlapc.codegen.compiled_graph import NAME, CompiledGraph, order_hash
from overlapc.codegen.generators import KernelSource
from overlapc.codegen.parts import Partition
from overlapc.codegen.program import Program
from overlapc.codegen.python import PythonWrapper
from overlapc.report.model import GraphRecord
from overlapc.runtime.copies.pool import StoredCopies


@dataclass(frozen=True)
class Generated:
    """The program of one graph before it is printed, and its record."""

    program: Program
    kernels: Sequence[tuple[str, KernelSource]]  # device type and source
    parts: Partition | None  # the program split for CUDA graphs; None without them
    report: GraphRecord
    counts: Mapping[str, int]  # increments of `counters["overlapc"]`
    order: Sequence[str]  # its collectives, one a line
    agreed: object = None  # see CompiledGraph
    copies: Sequence[StoredCopies] = ()
    divided: Sequence[Any] = ()  # see CompiledGraph

    def printed(
        self, gm: GraphModule, *, tracked: bool, checks: frozenset[str]
    ) -> tuple[CompiledGraph, dict[str, Any]]:
        """Return (the compiled graph, which can be cached; the objects that its wrapper calls, by name).

        gm: the FX graph that holds the constants. tracked, checks: see PythonWrapper.
        The wrapper with profiler marks is not split for CUDA graphs: replays would not run marks inside of a part.
        """
        anonymous = dataclasses.replace(self.program, name=NAME)
        wrapper = PythonWrapper(anonymous, tracked=tracked, checks=checks, partition=self.parts)
        marked = PythonWrapper(anonymous, marked=True, tracked=tracked, checks=checks)
        attributes = {f"constant_{node.name}": str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
        kept = CompiledGraph(
            name=self.program.name,
            wrapper=wrapper.source,
            marked=marked.source,
            objects=marked.texts,
            constants={name: attributes[name] for name in self.program.constants},
            kernels=tuple(self.kernels),
            counts=dict(self.counts),
            order=order_hash(self.order, {copies.group: copies.layout for copies in self.copies}),
            copies=tuple(self.copies),
            divided=tuple(self.divided),
            agreed=self.agreed,
            record=self.report,
        )
        return kept, {**wrapper.objects, **marked.objects}
