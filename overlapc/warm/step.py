"""A whole step, found by the graph that Dynamo captured: neither AOTAutograd nor the compiler is asked again.

Only steps with nothing special about them (`plain`: plain tensors in and out, no mutated inputs, no aliased outputs)
run without AOTAutograd's wrapper; those of static sizes that do not communicate are kept. All others still start warm
graph by graph (`warm.graph`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overlapc.fx.versions import step_metadata
from overlapc.runtime.cache import KernelCache
from overlapc.runtime.counters import count
from overlapc.runtime.step import Call, StepPlan, Tangent, step_function
from overlapc.warm import graph as graphs
from overlapc.warm.stored import UNREADABLE, decode, encode

FORMAT = 1
_SUFFIX = ".step.json"


def of_plain_tensors(gm: GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether what Dynamo captured takes and returns no tensors that hold others, as DTensors do.

    AOTAutograd takes those apart first, and then tells its compilers of what is inside only.
    """
    (output,) = gm.graph.find_nodes(op="output")
    returned = [each.meta.get("example_value") for each in output.all_input_nodes]
    return not any(
        is_traceable_wrapper_subclass(value) for value in (*inputs, *gm.buffers(), *gm.parameters(), *returned)
    )


class StepWatch:
    """Sees the graphs of one step being compiled: a plain one then runs without AOTAutograd's wrapper, and is kept."""

    def __init__(self, key: str | None, cache_dir: Path) -> None:
        self._key = key  # None: not to be kept
        self._cache_dir = cache_dir
        self._plan: StepPlan | None = None
        self._keys: list[str | None] = []
        self._forward: Call | None = None
        self._results = 0
        self._inputs = 0
        self.function: Callable[..., Any] | None = None  # once all graphs are compiled, if the step is plain

    def compiled(self, kind: str, gm: GraphModule, call: Call, key: str | None) -> None:
        """A graph of the step was compiled; `key` is None when it was not kept."""
        if kind != "backward":
            self._plan = plain(trains=kind == "forward")
            self._forward = call
            self._results = len(_results(gm))
            self._inputs = len(_placeholders(gm))
        carries = any(True for _ in gm.graph.find_nodes(op="get_attr"))  # which another process could not find
        self._keys.append(None if carries else key)
        if self._plan is None or (kind != "backward" and self._plan.trains):
            return
        if kind == "backward":
            self._plan = self._with_tangents(self._plan, gm)
        if self._plan is None or self._forward is None:
            return
        self.function = step_function(self._plan, self._forward, call)
        keys = [each for each in self._keys if each is not None]
        if self._key is not None and len(keys) == len(self._keys):
            _keep(self._key, self._plan, keys, self._cache_dir)

    def watched(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, which is AOTAutograd's, until the step can run without."""

        def step(*inputs: Any) -> Any:
            return (self.function or compiled)(*inputs)

        return step

    def _with_tangents(self, plan: StepPlan, gm: GraphModule) -> StepPlan | None:
        """`plan` with what this backward takes; None when it takes more than saved tensors and tangents."""
        placed = [node.meta.get("val") for node in _placeholders(gm)]
        values = [value for value in placed if isinstance(value, Tensor)]
        saved = self._results - plan.outputs
        differentiable = [at for at in range(plan.outputs) if at not in plan.constant]
        if not len(placed) == len(values) == saved + len(differentiable) or len(_results(gm)) != self._inputs:
            return None
        layouts = [(*value.shape, *value.stride()) for value in values[saved:]]
        if any(not isinstance(size, int) for layout in layouts for size in layout):
            return None
        tangents = tuple(
            Tangent(output, tuple(value.shape), tuple(value.stride()), value.dtype, value.device)
            for output, value in zip(differentiable, values[saved:], strict=True)
        )
        return StepPlan(plan.outputs, plan.constant, tangents, plan.trains, plan.autocast)


def plain(*, trains: bool) -> StepPlan | None:
    """How the step that AOTAutograd is compiling is called, less its tangents; None when it is not plain."""
    metadata = step_metadata()
    if metadata is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    constant = tuple(at for at, differentiable in enumerate(metadata) if not differentiable)
    return StepPlan(len(metadata), constant, (), trains, torch._C._is_any_autocast_enabled())


def find(key: str, cache_dir: Path) -> tuple[StepPlan, list[graphs.CompiledGraph]] | None:
    """The plan and the graphs (forward, then backward if it trains) of a kept step, if all of it is there."""
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
    found = [graphs.find(each, cache_dir) for each in keys]
    kept = [graph for graph in found if graph is not None]
    return (plan, kept) if len(kept) == len(found) else None


def bound(
    plan: StepPlan, kept: Sequence[graphs.CompiledGraph], run: Callable[[graphs.CompiledGraph], Call]
) -> Callable[..., Any]:
    """The step as a function. `run` makes a graph callable; for backward that happens when it is first needed."""
    made: list[Call] = []

    def backward(arguments: list[Any]) -> Any:
        if not made:
            made.append(run(kept[1]))
        return made[0](arguments)

    count("steps_from_cache")
    return step_function(plan, run(kept[0]), backward)


def _keep(key: str, plan: StepPlan, keys: Sequence[str], cache_dir: Path) -> None:
    text = json.dumps({"format": FORMAT, "plan": encode(plan), "graphs": list(keys)})
    _cache(cache_dir).get_or_build(key, _SUFFIX, lambda path: _write(path, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _placeholders(gm: GraphModule) -> list[torch.fx.Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def _results(gm: GraphModule) -> Sequence[Any]:
    (output,) = gm.graph.find_nodes(op="output")
    results = output.args[0]
    return results if isinstance(results, list | tuple) else [results]


@lru_cache(None)
def _cache(root: Path) -> KernelCache:
    return KernelCache(root, "steps")
