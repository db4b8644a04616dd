"""DTensors as inputs and gradients of a compiled step, whose graphs take and return local tensors only.

AOTAutograd's wrapper derives the description (`DTensorSpec`) of every gradient again in every backward, which takes the
host as long as launching several kernels. With static sizes it never changes, so here it is derived once.
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
    """The tensors that a step's graphs take in place of DTensors and return for its gradients, as plain values."""

    inputs: tuple[tuple[str, ...], ...]  # for each input, the attributes to pass in its place; none to pass it itself
    gradients: tuple[tuple[int, int | None, bool], ...]
    """For the gradient of each input: (index of the result of backward that is the gradient or its local part, index of
    the result that is its mesh, if one is, whether it is a DTensor, which then has the input's placements)."""

    def step(
        self, inputs: Sequence[Any], forward: Call, backward: Call, function: Callable[[Call, Call], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """Return `function(forward, backward)` of graphs converted to take and return DTensors.

        inputs: those of the first call.
        """
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
    """The DTensors a step was compiled for: the properties that its graphs do not check themselves (they check sizes).

    Dynamo's guards check them, too, unless `overlapc.trust_modules` dropped those guards.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        """Remember the DTensors among `inputs`, which are those of the first call."""
        self._known = [(at, *_known_of(value)) for at, value in enumerate(inputs) if isinstance(value, DTensor)]

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise LayoutError if a DTensor's mesh, placements, dtype, device or `requires_grad` have changed."""
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
    """Makes a DTensor gradient from the results of the backward graph: its local part is result `at`.

    mesh_at: the index of the result that is its mesh, if one is. make: AOTAutograd's slow conversion, which is used for
    the first description and when the mesh is another one.
    """

    __slots__ = ("_at", "_make", "_mesh", "_mesh_at", "_spec")

    def __init__(self, at: int, mesh_at: int | None, make: Callable[[Sequence[Any]], Tensor]) -> None:
        self._at = at
        self._mesh_at = mesh_at
        self._make = make
        self._mesh: DeviceMesh | None = None
        self._spec: Any = None

    def __call__(self, results: Sequence[Any]) -> Tensor:
        """Return the gradient."""
        mesh = None if self._mesh_at is None else results[self._mesh_at]
        if self._spec is None or mesh is not self._mesh:
            made = self._make(results)
            assert isinstance(made, DTensor)
            self._spec, self._mesh = made._spec, mesh
            return made
        # Bypass `__init__`, which does nothing and takes twice as long as this.
        return DTensor.__new__(DTensor, results[self._at], self._spec, requires_grad=False)


def taking_dtensors(forward: Call, inputs: Sequence[tuple[str, ...]]) -> Call:
    """Return `forward` converted to take DTensors. inputs: as in `Borders`."""

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
    """Return `backward` converted to return a gradient for each input: the result at an index, or a remade DTensor."""

    def call(arguments: list[Any]) -> tuple[Any, ...]:
        results = backward(arguments)
        return tuple([results[each] if isinstance(each, int) else each(results) for each in gradients])

    return call
