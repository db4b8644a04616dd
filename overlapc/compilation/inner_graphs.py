"""Compiles the inner graphs of a graph: branches of conditionals, loop bodies, nested compile regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from overlapc.config import Config
from overlapc.estimators.user_times import EarlierRun
from overlapc.fx.subgraphs import is_loop, return_tuple, subgraphs
from overlapc.runtime.support import unboxed


@dataclass(frozen=True)
class Built:
    """A compiled graph."""

    call: Callable[[list[Any]], Any]
    step_ns: float | None  # simulated time of a run; None for a graph that runs uncompiled
    cached: bool = False  # whether it is in the disk cache
    module: GraphModule | None = None  # the compiled graph as a module; only with wrapper="fx"


def inner_graphs(gm: GraphModule, config: Config, name: str, build: Callable[..., Built]) -> dict[GraphModule, Built]:
    """Compile each inner graph of `gm` once. The compiled functions take their arguments one by one."""
    found: dict[GraphModule, Built] = {}
    for subgraph in subgraphs(gm):
        if subgraph.module not in found:
            single = return_tuple(subgraph.module)
            built = build(subgraph.module, config, f"{subgraph.name}_of_{name}", is_inner=True, single=single)
            found[subgraph.module] = Built(unboxed(built.call, single), built.step_ns, module=built.module)
    return found


def times_of_inner(gm: GraphModule, inner: Mapping[GraphModule, Built]) -> EarlierRun:
    """Return the times of calls of inner graphs: that of its longest branch for a conditional, none for a loop."""
    times: dict[str, list[float | None]] = {}
    for subgraph in subgraphs(gm):
        times.setdefault(subgraph.reader.name, []).append(
            None if is_loop(subgraph.reader) else inner[subgraph.module].step_ns
        )
    known = {node: [ns for ns in all_ns if ns is not None] for node, all_ns in times.items() if None not in all_ns}
    return EarlierRun({node: ("", max(all_ns)) for node, all_ns in known.items()}, name="simulated branches")
