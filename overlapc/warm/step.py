"""A whole step, found by the graph that Dynamo captured: neither AOTAutograd nor the compiler is asked again.

Only steps with nothing special about them (`plain`: plain tensors in and out, inputs changed by the graph alone, no
aliased outputs) run without AOTAutograd's wrapper; those of static sizes that do not communicate are kept. All others
still start warm graph by graph (`warm.graph`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overlapc.fx.versions import StepMetadata, mark_dynamic, step_metadata
from overlapc.runtime.cache import KernelCache
from overlapc.runtime.counters import count
from overlapc.runtime.step import Call, StepPlan, step_function
from overlapc.runtime.tangents import SizedTangent, Tangent
from overlapc.warm import graph as graphs
from overlapc.warm.fingerprint import shared_memory
from overlapc.warm.stored import UNREADABLE, decode, encode

FORMAT = 2
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

    def __init__(self, key: str | None, cache_dir: Path, inputs: Sequence[Any]) -> None:
        """key: of the step; None if it must not be kept. inputs: examples of what Dynamo calls it with."""
        self._key = key
        self._cache_dir = cache_dir
        self._inputs = len(inputs)
        self._overlaps = bool(shared_memory(inputs))
        self._plan: StepPlan | None = None
        self._metadata: StepMetadata | None = None
        self._keys: list[str | None] = []
        self._forward: Call | None = None
        self._results = 0
        self._ready: Callable[..., Any] | None = None  # once all graphs are compiled, if the step is plain
        self._called = False
        self.function: Callable[..., Any] | None = None  # `_ready`, after the first call

    def compiled(self, kind: str, gm: GraphModule, call: Call, key: str | None) -> None:
        """A graph of the step was compiled; `key` is None when it was not kept."""
        if kind != "backward":
            self._metadata = plain()
            if self._metadata is not None and self._metadata.inputs == len(_placeholders(gm)) == self._inputs:
                self._plan = _plan(self._metadata, trains=kind == "forward")
            self._forward = call
            self._results = len(_results(gm))
        carries = any(True for _ in gm.graph.find_nodes(op="get_attr"))  # which another process could not find
        self._keys.append(None if carries else key)
        if self._plan is None or (kind != "backward" and self._plan.trains):
            return
        if kind == "backward":
            self._plan = self._with_backward(self._plan, gm)
        if self._plan is None or self._forward is None:
            return
        self._ready = step_function(self._plan, self._forward, call, mark_dynamic)
        keys = [each for each in self._keys if each is not None]
        # Inputs that lie in one memory are AOTAutograd's to guard, if one of them changes.
        guarded = self._overlaps and self._plan.changed
        if self._key is not None and len(keys) == len(self._keys) and self._plan.of_static_sizes() and not guarded:
            _keep(self._key, self._plan, keys, self._cache_dir)

    def watched(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, which is AOTAutograd's, until the step can run without.

        The first call is AOTAutograd's in any case: it looks at what custom ops return.
        """

        def step(*inputs: Any) -> Any:
            if self.function is None and self._called:
                self.function = self._ready
            self._called = True
            return (self.function or compiled)(*inputs)

        return step

    def _with_backward(self, plan: StepPlan, gm: GraphModule) -> StepPlan | None:
        """`plan` with what this backward takes; None when it takes more than sizes, saved tensors and tangents."""
        assert self._metadata is not None
        placed = [node.meta.get("val") for node in _placeholders(gm)]
        values = [value for value in placed[plan.sizes :] if isinstance(value, Tensor)]
        saved = self._results - plan.outputs - plan.sizes
        differentiable = [at for at in range(plan.outputs) if at not in plan.constant]
        results = _results(gm)
        if not len(placed) - plan.sizes == len(values) == saved + len(differentiable) or len(results) != self._inputs:
            return None
        formats = self._metadata.formats or (None,) * len(differentiable)
        found = map(_tangent, differentiable, values[saved:], formats)
        tangents = tuple(each for each in found if each is not None)
        if len(tangents) != len(differentiable):
            return None
        detached = tuple(at for at in self._metadata.computed if results[at] is None)
        return replace(plan, tangents=tangents, detached=detached)


def plain() -> StepMetadata | None:
    """Of the step that AOTAutograd is compiling; None when it is not plain."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    return step_metadata()


def _plan(metadata: StepMetadata, *, trains: bool) -> StepPlan:
    """How the step of `metadata` is called, less what only its backward tells."""
    return StepPlan(
        len(metadata.differentiable),
        tuple(at for at, differentiable in enumerate(metadata.differentiable) if not differentiable),
        (),
        trains,
        torch._C._is_any_autocast_enabled(),
        changed=metadata.changed,
        sizes=metadata.sizes if trains else 0,
        dynamic=metadata.dynamic,
        deterministic=metadata.deterministic,
    )


def _tangent(output: int, value: Tensor, format: torch.memory_format | None) -> Tangent | SizedTangent | None:
    """How backward takes the gradient of `output`; None when AOTAutograd does not say."""
    size, stride = tuple(value.shape), tuple(value.stride())
    if all(isinstance(each, int) for each in (*size, *stride)):
        return Tangent(output, size, stride, value.dtype, value.device)
    return None if format is None else SizedTangent(output, format, value.dtype)


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
    _cache(cache_dir).put(key, _SUFFIX, text)


def _placeholders(gm: GraphModule) -> list[torch.fx.Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def _results(gm: GraphModule) -> Sequence[Any]:
    (output,) = gm.graph.find_nodes(op="output")
    results = output.args[0]
    return results if isinstance(results, list | tuple) else [results]


@lru_cache(None)
def _cache(root: Path) -> KernelCache:
    return KernelCache(root, "steps")
