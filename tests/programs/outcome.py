"""The outcome of one call of a program: results, changed arguments, gradients, and which tensors share memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


@dataclass(frozen=True)
class Outcome:
    """Values by name, copied before backward, and traits of tensors: dtype, layout, requires_grad, shared memory."""

    values: dict[str, Any]
    traits: dict[str, str]

    @staticmethod
    def of(
        space: dict[str, Any],
        call: Mapping[str, int],
        function: Callable[..., Any] | None = None,
        around: Any = None,
    ) -> Outcome:
        """Call `function` (default: the program's own) on new inputs, and run backward, both inside `around`."""
        arguments, leaves = space["inputs"](**call)
        torch.manual_seed(0)
        with around or contextlib.nullcontext():
            results = (function or space["f"])(*arguments)
        flat = tree_flatten(results)[0]
        named = {f"result {at}": x for at, x in enumerate(flat)} | {
            f"argument {at}": x for at, x in enumerate(arguments)
        }
        values = {name: x.detach().clone() if isinstance(x, Tensor) else x for name, x in named.items()}
        traits = seen_of(named)
        wanted = [x for x in leaves if x.requires_grad]
        given = [x for x in named.values() if isinstance(x, Tensor) and x.requires_grad and not x.is_leaf]
        if wanted and given:
            ones = [space["numbers"](1000 + at, y.shape, "F64").to(y.dtype) for at, y in enumerate(given)]
            with around or contextlib.nullcontext():
                grads = torch.autograd.grad(given, wanted, ones, allow_unused=True)
            for at, (x, g) in enumerate(zip(wanted, grads, strict=True)):
                values[f"gradient {at}"] = (torch.zeros_like(x) if g is None else g).detach()
                traits[f"gradient {at}"] = "" if g is None else f"{g.dtype} {tuple(g.shape)}"
                if g is None:
                    traits[f"gradient {at}"] = f"{x.dtype} {tuple(x.shape)}"
        return Outcome(values, traits)


def seen_of(named: Mapping[str, Any]) -> dict[str, str]:
    """Return, for each tensor, its dtype, layout, requires_grad, and the earlier tensor with which it shares memory.

    The storage offset of a result is ignored, but the distance between two tensors in shared memory is not.
    """
    owners: dict[int, str] = {}
    traits: dict[str, str] = {}
    # Arguments first, because a result may be a view of an argument but not the other way round.
    for name, x in sorted(named.items()):
        if not isinstance(x, Tensor):
            traits[name] = type(x).__name__
            continue
        storage = x.untyped_storage()
        owner = owners.setdefault(storage.data_ptr(), name) if storage.nbytes() and x.numel() else name
        strides = tuple(s if n > 1 else 0 for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else ()
        traits[name] = f"{x.dtype} {tuple(x.shape)} strides {strides} requires_grad={x.requires_grad}"
        if owner != name:
            begins = named[owner].storage_offset() * named[owner].element_size()
            offset_bytes = x.storage_offset() * x.element_size() - begins
            traits[name] += f" shares {owner} {offset_bytes} bytes on"
        elif name.startswith("argument"):
            traits[name] += f" offset {x.storage_offset()}"
    return traits
