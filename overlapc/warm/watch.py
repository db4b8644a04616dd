"""Watch a step being compiled, so that from its second call on it runs without AOTAutograd's wrapper, if possible.

For plain tensors all that this needs is known once the graphs are compiled, and the step may be cached. How DTensors
are passed to the graphs, and which gradients are DTensors, is known only from the result of AOTAutograd's first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overlapc.fx.versions.dynamo import assumptions
from overlapc.fx.versions.step_metadata import StepMetadata, dtensor_step_metadata, mark_dynamic, step_metadata
from overlapc.graph_names import BACKWARD, FORWARD
from overlapc.runtime.counters import count
from overlapc.runtime.dtensors import Borders, KnownDTensors, Remade, giving_dtensors, taking_dtensors
from overlapc.runtime.step import Call, StepPlan, step_function
from overlapc.runtime.tangents import SizedTangent, Tangent
from overlapc.warm.cached_step import store
from overlapc.warm.fingerprint import shared_memory


def of_plain_tensors(gm: GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether the graph that Dynamo captured takes and returns no wrapper tensors, such as DTensors.

    AOTAutograd unwraps these first, and its compilers then see only the tensors inside.
    """
    (output,) = gm.graph.find_nodes(op="output")
    returned = [each.meta.get("example_value") for each in output.all_input_nodes]
    return not any(
        is_traceable_wrapper_subclass(value) for value in (*inputs, *gm.buffers(), *gm.parameters(), *returned)
    )


@dataclass(frozen=True, slots=True)
class _Graph:
    """A compiled graph with its inputs and results, without the FX graph, which may be freed."""

    call: Call
    taken: list[Any]  # an example of each input
    returned: tuple[bool, ...]  # whether each result has a value

    @classmethod
    def of(cls, gm: GraphModule, call: Call) -> _Graph:
        taken = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        results: Any = gm.graph.output_node().args[0]
        results = results if isinstance(results, list | tuple) else [results]
        return cls(call, taken, tuple(each is not None for each in results))


class StepWatch:
    """Observes the compilation of one step's graphs, and its first call."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], key: str | None, cache_dir: Path) -> None:
        """Watch the step of `gm` and `inputs`, as Dynamo captured them.

        key: the step's cache key, or None if it must not be cached.
        """
        self._plain = of_plain_tensors(gm, inputs)
        self._inputs = len(inputs)
        self._output = gm.graph.output_node()
        self._outputs = self._output.args  # they change when views are taken out of the graph
        # If an input that shares memory with another is changed, AOTAutograd has to guard that.
        self._overlaps = bool(shared_memory(inputs))
        self._key = key
        self._assumed = assumptions()
        self._cache_dir = cache_dir
        self._keys: list[str | None] = []  # cache keys of the step's graphs
        self._forward: _Graph | None = None
        self._backward: _Graph | None = None
        self._trains = False
        self._autocast = False
        self._hooked = False  # whether saved tensors go through hooks, which AOTAutograd compiled into the graphs
        self._metadata: StepMetadata | None = None
        self._ready: Callable[..., Any] | None = None  # the step without the wrapper, once known to be possible
        self._called = False
        self.communicates = False  # whether forward or backward communicates, set before either is compiled
        self.function: Callable[..., Any] | None = None  # `_ready`, after the first call

    def compiled(self, kind: str, gm: GraphModule, call: Call, key: str | None) -> None:
        """Note that a graph of the step was compiled; `key` is its cache key, or None if it was not cached."""
        graph = _Graph.of(gm, call)
        if kind == BACKWARD:
            self._backward = graph
        else:
            self._forward = graph
            self._trains = kind == FORWARD
            self._autocast = torch._C._is_any_autocast_enabled()
            self._hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
            self._metadata = step_metadata() if self._plain else None
        carries = any(True for _ in gm.graph.find_nodes(op="get_attr"))  # another process could not find these
        self._keys.append(None if carries else key)
        self._finish()

    def watched(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `compiled`, AOTAutograd's wrapper, until the step can run without the wrapper.

        The first call uses the wrapper in any case, because AOTAutograd then checks the results of custom ops.
        """

        def step(*inputs: Any) -> Any:
            if self.function is None and self._called:
                self.function = self._ready
            self._called = True
            return (self.function or compiled)(*inputs)

        return step if self._plain else self._known_after_first_call(step)

    def _known_after_first_call(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `step`, followed at its first call by reading what AOTAutograd does not tell before."""
        known: KnownDTensors | None = None

        def call(*inputs: Any) -> Any:
            nonlocal known
            if known is not None:
                known.check(inputs)
                return step(*inputs)
            outputs = step(*inputs)
            known = KnownDTensors(inputs)
            if self._trains:
                self._metadata = dtensor_step_metadata(outputs)
                if self._metadata is None:
                    count("steps_under_torchs_wrapper")
                self._finish()
            return outputs

        return call

    def _finish(self) -> None:
        """Make the step without the wrapper once all is known, and cache it if a later process can rebuild it."""
        forward, backward, metadata = self._forward, self._backward, self._metadata
        if self._output.args != self._outputs:
            return
        if metadata is None or forward is None or self._hooked or (self._trains and backward is None):
            return
        self._forward = self._backward = None
        flat = sum(len(attributes) or 1 for attributes in metadata.inputs)
        if len(metadata.inputs) != self._inputs or flat != len(forward.taken):
            return
        plan = _plan(metadata, forward, backward, self._autocast)
        if plan is None:
            return
        plan = replace(plan, communicates=self.communicates)
        call, call_back = forward.call, (backward or forward).call
        cacheable = plan if self._plain else None
        if not self._plain:
            gradients = [
                each.at if each.make is None else Remade(each.at, each.mesh_at, each.make)
                for each in metadata.gradients
            ]
            call, call_back = taking_dtensors(call, metadata.inputs), giving_dtensors(call_back, gradients)
            if all(each.as_input or not (backward or forward).returned[each.at] for each in metadata.gradients):
                border = tuple((each.at, each.mesh_at, each.make is not None) for each in metadata.gradients)
                cacheable = replace(plan, borders=Borders(metadata.inputs, border))
        self._ready = step_function(plan, call, call_back, mark_dynamic)
        keys = [each for each in self._keys if each is not None]
        guarded = self._overlaps and plan.changed
        if (
            self._key is None
            or cacheable is None
            or len(keys) < len(self._keys)
            or guarded
            or not plan.of_static_sizes()
            or self._assumed() > 0
        ):
            return
        store(self._key, cacheable, keys, self._cache_dir)


def _plan(metadata: StepMetadata, forward: _Graph, backward: _Graph | None, autocast: bool) -> StepPlan | None:
    """Return how to call the step of `metadata`; None if its graphs take or return other things than that says."""
    plan = StepPlan(
        len(metadata.differentiable),
        tuple(at for at, differentiable in enumerate(metadata.differentiable) if not differentiable),
        (),
        backward is not None,
        autocast,
        changed=metadata.changed,
        dynamic=metadata.dynamic,
        deterministic=metadata.deterministic,
    )
    if backward is None:
        return plan
    differentiable = [at for at in range(plan.outputs) if at not in plan.constant]
    saved = len(forward.returned) - plan.outputs - metadata.objects - metadata.sizes
    after_sizes = backward.taken[metadata.sizes :]
    tensors = after_sizes[:saved] + after_sizes[saved + metadata.objects :]
    results = sum(1 if each.mesh_at is None else 2 for each in metadata.gradients)
    if (
        len(tensors) != saved + len(differentiable)
        or not all(isinstance(each, Tensor) for each in tensors)
        or len(metadata.gradients) != len(metadata.inputs)
        or len(backward.returned) != results
    ):
        return None
    formats = metadata.formats or (None,) * len(differentiable)
    found = map(_tangent, differentiable, tensors[saved:], formats)
    tangents = tuple(each for each in found if each is not None)
    if len(tangents) != len(differentiable):
        return None
    detached = tuple(at for at in metadata.computed if not backward.returned[metadata.gradients[at].at])
    return replace(plan, tangents=tangents, detached=detached, sizes=metadata.sizes, objects=metadata.objects)


def _tangent(output: int, value: Tensor, format: torch.memory_format | None) -> Tangent | SizedTangent | None:
    """Return how backward takes the gradient of `output`; None if AOTAutograd does not say."""
    size, stride = tuple(value.shape), tuple(value.stride())
    if all(isinstance(each, int) for each in (*size, *stride)):
        return Tangent(output, size, stride, value.dtype, value.device)
    return None if format is None else SizedTangent(output, format, value.dtype)
