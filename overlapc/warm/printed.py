"""A program as what can be kept of it: the printed wrapper, its kernels' sources and its record."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch.fx import GraphModule

from overlapc.codegen.kernel import KernelSource
from overlapc.codegen.parts import Partition
from overlapc.codegen.program import Program
from overlapc.codegen.python import PythonWrapper
from overlapc.report.model import GraphRecord
from overlapc.warm.graph import NAME, CompiledGraph


def compiled_graph(
    program: Program,
    kernels: Iterable[tuple[str, KernelSource]],
    gm: GraphModule,
    record: GraphRecord,
    counts: Mapping[str, int],
    order: Iterable[str],
    *,
    tracked: bool = False,
    checks: frozenset[str] = frozenset(),
    partition: Partition | None = None,
) -> tuple[CompiledGraph, dict[str, Any]]:
    """(what can be kept, the objects that its wrapper calls) of a program.

    partition: its parts for CUDA graphs; a profiler's marks would not be in these, so the marked version has none.
    """
    anonymous = dataclasses.replace(program, name=NAME)
    wrapper = PythonWrapper(anonymous, tracked=tracked, checks=checks, partition=partition)
    marked = PythonWrapper(anonymous, marked=True, tracked=tracked, checks=checks)
    attributes = {f"constant_{node.name}": str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
    kept = CompiledGraph(
        name=program.name,
        wrapper=wrapper.source,
        marked=marked.source,
        objects=marked.texts,
        constants={name: attributes[name] for name in program.constants},
        kernels=tuple(kernels),
        counts=dict(counts),
        order=hashlib.sha256("\n".join(order).encode()).hexdigest(),
        record=record,
    )
    return kept, {**wrapper.objects, **marked.objects}
