"""DTensors as inputs of a compiled step, and gradients that are DTensors; compiled graphs know only local tensors.

AOTAutograd's wrapper derives the description (`DTensorSpec`) of every gradient again in every backward, which takes a
host as long as launching several kernels. Of static sizes it is the same each time: here it is derived once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from overlapc.runtime.support import LayoutError

Call = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Borders:
    """What the graphs of a step take in place of DTensors, and the parts of its gradients, as plain values."""

    inputs: tuple[tuple[str, ...], ...]  # the attributes of each, none for the input itself
    gradients: tuple[tuple[int, int | None, bool], ...]
    """Of each input: the result of backward that is its local part, or all of it; the result that is its mesh, if one
    is; whether it is a DTensor, which is then laid out as the input is."""

    def step(
        self, inputs: Sequence[Any], forward: Call, backward: Call, function: Callable[[Call, Call], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """What `function` makes of graphs that take and return what DTensors hold. inputs: of the first call."""
        gradients = [
            Remade(at, mesh_at, _like(inputs[number]._spec, at, mesh_at)) if is_dtensor else at
            for number, (at, mesh_at, is_dtensor) in enumerate(self.gradients)
        ]
        return function(taking_dtensors(forward, self.inputs), giving_dtensors(backward, gradients))


def _like(spec: Any, at: int, mesh_at: int | None) -> Callable[[Sequence[Any]], Tensor]:
    def make(results: Sequence[Any]) -> Tensor:
        mesh = spec.mesh if mesh_at is None else results[mesh_at]
        same = spec if mesh is spec.mesh else replace(spec, mesh=mesh)
        made: Tensor = DTensor.__new__(DTensor, results[at], same, requires_grad=False)
        return made

    return make


class KnownDTensors:
    """The DTensors a step was compiled for, as far as its graphs do not check them themselves (they check sizes).

    Dynamo's guards hold it, unless `overlapc.trust_modules` dropped them.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        """inputs: of the first call."""
        self._known = [(at, *_known_of(value)) for at, value in enumerate(inputs) if isinstance(value, DTensor)]

    def check(self, inputs: Sequence[Any]) -> None:
        """LayoutError if a DTensor's mesh, placements, dtype, device or `requires_grad` have changed."""
        for at, spec, dtype, device, requires_grad in self._known:
            value = inputs[at]
            local = value._local_tensor
            if (
                (value._spec is not spec and (value._spec.mesh, value._spec.placements) != (spec.mesh, spec.placements))
                or local.dtype != dtype
                or local.device != device
                or value.requires_grad != requires_grad
            ):
                raise LayoutError(
                    f"input {at} of a compiled step is a DTensor {_text(*_known_of(value))}, but the step was compiled"
                    f" for {_text(spec, dtype, device, requires_grad)}\nhint: Dynamo recompiles for another parameter"
                    " without guard_filter_fn=overlapc.trust_modules; with it, torch._dynamo.reset() compiles again"
                )


def _known_of(value: DTensor) -> tuple[Any, torch.dtype, torch.device, bool]:
    return value._spec, value._local_tensor.dtype, value._local_tensor.device, value.requires_grad


def _text(spec: Any, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> str:
    return f"{spec.placements} on {spec.mesh} ({dtype}, {device}, requires_grad={requires_grad})"


class Remade:
    """Makes a gradient of what the backward graph returns: its local part at `at`, at `mesh_at` perhaps the mesh.

    make: AOTAutograd's slow way, for a first description or another mesh.
    """

    __slots__ = ("_at", "_make", "_mesh", "_mesh_at", "_spec")

    def __init__(self, at: int, mesh_at: int | None, make: Callable[[Sequence[Any]], Tensor]) -> None:
        self._at = at
        self._mesh_at = mesh_at
        self._make = make
        self._mesh: DeviceMesh | None = None
        self._spec: Any = None

    def __call__(self, results: Sequence[Any]) -> Tensor:
        """The gradient."""
        mesh = None if self._mesh_at is None else results[self._mesh_at]
        if self._spec is None or mesh is not self._mesh:
            made = self._make(results)
            assert isinstance(made, DTensor)
            self._spec, self._mesh = made._spec, mesh
            return made
        # Past `__init__`, which does nothing but takes twice as long as this.
        return DTensor.__new__(DTensor, results[self._at], self._spec, requires_grad=False)


def taking_dtensors(forward: Call, inputs: Sequence[tuple[str, ...]]) -> Call:
    """`forward`, given DTensors. inputs: the attributes of each that the graph takes in its place, none for itself."""

    def call(given: list[Any]) -> Any:
        inside: list[Any] = []
        for value, attributes in zip(given, inputs, strict=True):
            if attributes:
                inside += [getattr(value, name) for name in attributes]
            else:
                inside.append(value)
        given.clear()
        return forward(inside)

    return call


def giving_dtensors(backward: Call, gradients: Sequence[int | Remade]) -> Call:
    """`backward`, returning a gradient for each input: the result at an index, or what is made of results."""

    def call(arguments: list[Any]) -> tuple[Any, ...]:
        results = backward(arguments)
        return tuple([results[each] if isinstance(each, int) else each(results) for each in gradients])

    return call
