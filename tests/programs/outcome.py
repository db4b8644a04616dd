"""What one call of a program leaves behind: results, changed arguments, gradients, who shares memory with whom."""

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
    """Named values, as they were before backward; and of each tensor what else can be seen of it."""

    values: dict[str, Any]
    traits: dict[str, str]

    @staticmethod
    def of(
        space: dict[str, Any],
        call: Mapping[str, int],
        function: Callable[..., Any] | None = None,
        around: Any = None,
    ) -> Outcome:
        """Calls `function`, or the program's own, on fresh inputs; `around` is entered for call and backward."""
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
    """Dtype, layout, gradient, and with which earlier tensor memory is shared: how far into a result's memory it
    begins is nobody's business, how far two results are apart is."""
    owners: dict[int, str] = {}
    traits: dict[str, str] = {}
    # Arguments first: a result is a view of an argument, not the other way round.
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
