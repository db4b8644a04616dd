"""DTensors that go into a compiled step, and gradients that are DTensors: its graphs know what is inside of them only.

AOTAutograd's wrapper derives the description (`DTensorSpec`) of every gradient anew in every backward, which takes a
host as long as launching several kernels. Of static sizes it is the same each time: here it is derived once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Call = Callable[[list[Any]], Any]


class Remade:
    """Makes a gradient of what the backward graph returns: its local part at `at`, at `mesh_at` perhaps the mesh.

    make: the same, slowly: it is asked when there is no description yet, or another mesh.
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
