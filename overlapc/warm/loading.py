"""Makes compiled graphs and cached steps callable in this process, counts and reports them."""

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


Agree = Callable[[Sequence[CompiledGraph]], Sequence[Mapping[str, GraphCopies]] | None]
"""Of a cached step's graphs, the copies of each to run it with, by pool; None where ranks do not all have this step."""

_numbers = itertools.count()


def next_number() -> int:
    """What tells the graphs of one step from those of the steps before, in their names: `forward_0`, `backward_0`."""
    return next(_numbers)


def uses_disk_cache(config: Config) -> bool:
    """Whether compiled graphs go to disk: not where the user dumps stages, or wants the graph itself."""
    return bool(config.warm_start) and not (config.dump or config.debug) and config.wrapper == "python"


def make_callable(
    compiled: CompiledGraph,
    config: Config,
    name: str,
    began: float,
    *,
    objects: Mapping[str, Any] | None = None,
    gm: GraphModule | None = None,
    within: bool = False,
    found: Found = "",
    graph: FxWrapper | None = None,
    copies: Mapping[str, GraphCopies] = MappingProxyType({}),
) -> Callable[[list[Any]], Any]:
    """A compiled graph made callable, counted and reported under the name it has in this process.

    found: what the disk cache had. graph: what runs instead of the generated function. copies: see CompiledGraph.
    """
    named = compiled.named(name)
    plain = graph.function if graph else None
    call = deterministically(named.function(config.cache_dir, objects, gm, plain, copies), config.deterministic)
    for counter, times in named.counts.items():
        count(counter, times)
    if not within:
        record.add(replace(named.record, compile_seconds=time.perf_counter() - began, found=found))
    return call


def _from_cache(
    compiled: CompiledGraph, copies: Mapping[str, GraphCopies], *, config: Config, number: int
) -> Callable[[list[Any]], Any]:
    """A graph of a step that was found on disk."""
    kind = compiled.name.split("_")[0]
    return make_callable(compiled, config, f"{kind}_{number}", time.perf_counter(), found="step", copies=copies)


def load_step(
    key: str | None,
    config: Config,
    number: int | None = None,
    agree: Agree | None = None,
) -> Callable[..., Any] | None:
    """The step that the disk cache has under `key`; None without one, or where ranks do not `agree` to use it.

    `agree` is asked in any case, without graphs where there is no step."""
    kept = None if key is None else cached_step.find(key, config.cache_dir)
    graphs = () if kept is None else kept[1]
    if agree is not None:
        copies = agree(graphs)
    else:
        copies = None if any(graph.copies for graph in graphs) else [{} for _ in graphs]  # ranks open pools together
    if kept is None or copies is None:
        return None
    number = next_number() if number is None else number
    made = [
        partial(_from_cache, graph, of_graph, config=config, number=number)
        for graph, of_graph in zip(graphs, copies, strict=True)
    ]
    return cached_step.step_callable(kept[0], made)


def environment_of(config: Config, devices: Collection[str]) -> tuple[str, str]:
    """What a step depends on beside its graph. NotCacheable for options that have no fingerprint."""
    return environment_key(config), profile_text(config, devices)
