"""Arguments of a call, whether positional, named or left at their defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx


def argument(node: fx.Node, at: int | str) -> Any:
    """Return a positional or named argument of a call, or None; as Any, because FX's own type is too wide to use."""
    if isinstance(at, str):
        return node.kwargs.get(at)
    return node.args[at] if at < len(node.args) else None


def declared_arguments(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Argument, Any]]:
    """Yield each argument in the schema of `target` with its value in the call, or its default.

    Yield nothing if `target` is not a torch op.
    """
    if isinstance(target, torch._ops.OpOverload):
        for at, declared in enumerate(target._schema.arguments):
            yield declared, args[at] if at < len(args) else kwargs.get(declared.name, declared.default_value)


def is_written(declared: torch.Argument) -> bool:
    """Whether the op writes into this argument."""
    return declared.alias_info is not None and declared.alias_info.is_write
