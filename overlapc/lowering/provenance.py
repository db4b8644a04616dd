"""Where an FX node comes from: the user's line and the module, as Dynamo recorded them."""

from __future__ import annotations

from torch.fx import Node

from overlapc.fx.source import user_line
from overlapc.ir.ops import Provenance


def provenance(node: Node) -> Provenance:
    """Where `node` comes from: innermost user frame and module path, as Dynamo recorded them."""
    line = user_line(node)
    lines = (line,) if line else ()
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module = next(reversed(stack.values()))[0] if stack else ""
    return Provenance((node.name,), lines, clean_module(module))


def clean_module(path: str) -> str:
    """`L['self']._modules['layers']._modules['0']` or `L['self'].layers[0]` as `layers.0`."""
    for old, new in (
        ("L['self']", ""),
        ("._modules['", "."),
        ("']", ""),
        ("['", "."),
        ("[", "."),
        ("]", ""),
        ("L.", ""),
    ):
        path = path.replace(old, new)
    return path.strip(".").removeprefix("self.")
