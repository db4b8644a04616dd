"""Make compiled graphs and cached steps callable in this process, and count and record them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from overlapc.codegen.compiled_graph import CompiledGraph
from overlapc.config import Config
from overlapc.fx.versions.dynamo import note_collectives
from overlapc.graph_names import graph_name, kind_of
from overlapc.planning.chosen_profile import profile_text
from overlapc.report import record
from overlapc.runtime.copies.pool import GraphCopies
from overlapc.runtime.counters import count
from overlapc.runtime.deterministic import deterministically
from overlapc.warm import cached_step
from overlapc.warm.environment import environment_key

if TYPE_CHECKING:
    from overlapc.codegen.fx import FxWrapper
    from overlapc.report.model import Found


Agree = Callable[[str, Sequence[CompiledGraph]], Sequence[Mapping[str, GraphCopies]] | None]
"""Takes the kind of a step's first graph and the graphs of this rank's cached step (none if it has no such step), and
returns for each the copies to run it with, by pool; None unless all ranks have this step. All ranks that run the step
must call it."""

_numbers = itertools.count()


def next_number() -> int:
    """Return a new number for the names of a step's graphs, such as `forward_0` and `backward_0`."""
    return next(_numbers)


def uses_disk_cache(config: Config) -> bool:
    """Whether compiled graphs are cached on disk: not if the user dumps stages or asked for another wrapper."""
    return bool(config.warm_start) and not (config.dump or config.debug) and config.wrapper == "python"


def make_callable(
    compiled: CompiledGraph,
    config: Config,
    name: str,
    began: float,
    *,
    objects: Mapping[str, Any] | None = None,
    gm: GraphModule | None = None,
    is_inner: bool = False,
    found: Found = "",
    graph: FxWrapper | None = None,
    copies: Mapping[str, GraphCopies] = MappingProxyType({}),
) -> Callable[[list[Any]], Any]:
    """Make a compiled graph callable, and count and record it under its name in this process.

    found: what came from the disk cache. graph: runs instead of the generated function. copies: see CompiledGraph.
    is_inner: the graph is inside another one and is not recorded.
    """
    named = compiled.named(name)
    plain = graph.function if graph else None
    call = deterministically(named.function(config.cache_dir, objects, gm, plain, copies), config.deterministic)
    for counter, times in named.counts.items():
        count(counter, times)
    if not is_inner:
        record.add(replace(named.record, compile_seconds=time.perf_counter() - began, found=found))
    return call


def _from_cache(
    compiled: CompiledGraph, copies: Mapping[str, GraphCopies], *, config: Config, number: int
) -> Callable[[list[Any]], Any]:
    """Make a graph of a cached step callable."""
    name = graph_name(kind_of(compiled.name), number)
    return make_callable(compiled, config, name, time.perf_counter(), found="step", copies=copies)


def load_step(
    key: str | None,
    config: Config,
    number: int | None = None,
    agree: Agree | None = None,
) -> Callable[..., Any] | None:
    """Return the cached step of `key`; None if there is none, or if ranks do not `agree` to use it.

    `agree` is called only for a step that communicates: a rank may run any other step alone.
    """
    cached = None if key is None else cached_step.find(key, config.cache_dir)
    graphs: Sequence[CompiledGraph] = () if cached is None else cached[1]
    if agree is not None and cached is not None and cached[0].communicates:
        copies = agree(kind_of(graphs[0].name), graphs)
    else:
        copies = None if any(graph.copies for graph in graphs) else [{} for _ in graphs]  # all ranks open pools
    if cached is None or copies is None:
        return None
    if cached[0].communicates:
        note_collectives()
    number = next_number() if number is None else number
    made = [
        partial(_from_cache, graph, of_graph, config=config, number=number)
        for graph, of_graph in zip(graphs, copies, strict=True)
    ]
    return cached_step.step_callable(cached[0], made)


def environment_of(config: Config, devices: Collection[str]) -> tuple[str, str]:
    """Return what a step depends on besides its graph; raise NotCacheable for options that have no fingerprint."""
    return environment_key(config), profile_text(config, devices)
