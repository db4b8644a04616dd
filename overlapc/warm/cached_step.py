"""The disk cache of whole steps, found by the graph that Dynamo captured: neither AOTAutograd nor the compiler runs.

A step is cached if it can run without AOTAutograd's wrapper (`watch`) and takes plain tensors and DTensors of static
sizes. Other steps still start warm graph by graph (`cached_graph`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from overlapc.codegen.compiled_graph import CompiledGraph
from overlapc.runtime.cache import KernelCache
from overlapc.runtime.counters import count
from overlapc.runtime.step import Call, Step, StepPlan, step_function
from overlapc.warm import cached_graph
from overlapc.warm.stored import UNREADABLE, decode, encode

FORMAT = 5
_SUFFIX = ".step.json"


def store(key: str, plan: StepPlan, keys: Sequence[str], cache_dir: Path) -> None:
    """Store the step whose graphs (forward, then backward if it trains) are cached under `keys`."""
    text = json.dumps({"format": FORMAT, "plan": encode(plan), "graphs": list(keys)})
    _cache(cache_dir).put(key, _SUFFIX, text)


def find(key: str, cache_dir: Path) -> tuple[StepPlan, list[CompiledGraph]] | None:
    """Return the plan and the graphs (forward, then backward if it trains) of a cached step; None if one is missing."""
    text = _cache(cache_dir).read(key, _SUFFIX)
    if text is None:
        return None
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError("another format")
        plan, keys = decode(data["plan"]), [str(each) for each in data["graphs"]]
    except UNREADABLE:
        _cache(cache_dir).drop(key, _SUFFIX)
        return None
    graphs = [cached_graph.find(each, cache_dir) for each in keys]
    present = [graph for graph in graphs if graph is not None]
    return (plan, present) if len(present) == len(graphs) else None


def step_callable(plan: StepPlan, graphs: Sequence[Callable[[], Call]]) -> Callable[..., Any]:
    """Return the step as a function. `graphs` make each graph callable; backward is made when first needed."""
    made: list[Call] = []

    def backward(arguments: list[Any]) -> Any:
        if not made:
            made.append(graphs[1]())
        return made[0](arguments)

    count("steps_from_cache")
    forward, borders = graphs[0](), plan.borders
    if borders is None:
        return step_function(plan, forward, backward)
    from overlapc.runtime.dtensors import KnownDTensors

    step: Step | None = None
    known: KnownDTensors | None = None

    def of_dtensors(*inputs: Any) -> Any:
        nonlocal step, known
        if step is None or known is None:
            known = KnownDTensors(inputs)
            step = borders.step(inputs, forward, backward, partial(step_function, plan))
        else:
            known.check(inputs)
        return step(*inputs)

    return of_dtensors


@lru_cache(None)
def _cache(root: Path) -> KernelCache:
    return KernelCache(root, "steps")
