"""The origin of an FX node: the user's line and the module, as the tracer recorded them."""

from __future__ import annotations

from torch.fx import Node

from overlapc.fx.source import module_path, user_line
from overlapc.ir.ops import Provenance


def provenance(node: Node) -> Provenance:
    """Return the origin of `node`: its innermost user frame and module path."""
    line = user_line(node)
    return Provenance((node.name,), (line,) if line else (), module_path(node))
