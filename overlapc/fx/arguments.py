"""What a call gives for the arguments of its op, in whichever way it gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx


def argument(node: fx.Node, at: int | str) -> Any:
    """A positional or named argument of a call, or None; FX's own types say too little to be of use."""
    if isinstance(at, str):
        return node.kwargs.get(at)
    return node.args[at] if at < len(node.args) else None


def declared_arguments(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Argument, Any]]:
    """Each argument that the schema of `target` declares, and what the call gives for it, or else its default.

    None of what is no op of torch's.
    """
    if isinstance(target, torch._ops.OpOverload):
        for at, declared in enumerate(target._schema.arguments):
            yield declared, args[at] if at < len(args) else kwargs.get(declared.name, declared.default_value)


def is_written(declared: torch.Argument) -> bool:
    """Whether the op changes what it is given for this argument."""
    return declared.alias_info is not None and declared.alias_info.is_write
