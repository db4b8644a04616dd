"""A compiled graph made callable: bound to this process, counted, reported. All that a warm start runs of ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from overlapc.config import Config
from overlapc.report import record
from overlapc.runtime.counters import count
from overlapc.runtime.deterministic import deterministically
from overlapc.warm.graph import CompiledGraph

if TYPE_CHECKING:
    from overlapc.codegen.fx import FxWrapper


def keeps(config: Config) -> bool:
    """Whether compiled graphs go to disk: not where somebody wants to see the stages, or the graph itself."""
    return bool(config.warm_start) and not (config.dump or config.debug) and config.wrapper == "python"


def bind(
    compiled: CompiledGraph,
    config: Config,
    name: str,
    began: float,
    *,
    objects: Mapping[str, Any] | None = None,
    gm: GraphModule | None = None,
    within: bool = False,
    graph: FxWrapper | None = None,
) -> Callable[[list[Any]], Any]:
    """A compiled graph made callable, counted and reported under the name it has in this process.

    graph: what runs instead of the generated function.
    """
    named = compiled.named(name)
    plain = graph.bind if graph else None
    call = deterministically(named.bind(config.cache_dir, objects, gm, plain), config.deterministic)  # type: ignore[arg-type]
    for counter, times in named.counts.items():
        count(counter, times)
    if not within:
        record.add(replace(named.record, compile_seconds=time.perf_counter() - began))
    return call


def from_cache(compiled: CompiledGraph, *, config: Config, number: int) -> Callable[[list[Any]], Any]:
    """A graph of a step that was found on disk."""
    kind = compiled.name.split("_")[0]
    return bind(compiled, config, f"{kind}_{number}", time.perf_counter())
