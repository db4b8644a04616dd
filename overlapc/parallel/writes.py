"""Refuse to compile a forward that changes gathered parameters: the next gather would not contain the change."""

from __future__ import annotations

from torch import fx

from overlapc.errors import CompileError
from overlapc.fx.captured.in_place import changed_by
from overlapc.fx.captured.wrapped import memory_of
from overlapc.fx.source import user_line
from overlapc.parallel.gather import ShardedParam, param_of, unshard


def refuse_writes(graph: fx.Graph) -> None:
    """Raise CompileError for the first node of Dynamo's `graph` that writes into a gathered parameter or its view."""
    gathers = graph.find_nodes(op="call_function", target=unshard)
    keys = {memory_of(node): str(node.args[1]) for node in gathers}
    for node in graph.nodes if keys else ():
        for changed in changed_by(node):
            memory = memory_of(changed)
            if not memory or memory not in keys:
                continue
            line = user_line(node) or "unknown line"
            raise CompileError(f"{node.name} writes into {lost(param_of(keys[memory]), f'   {line}')}")


def lost(param: ShardedParam, *lines: str) -> str:
    """Return the end of a message about a write into the gathered `param`. lines: more about where."""
    name = ".".join(filter(None, (param.group.paths[param.part], param.name)))
    return "\n".join(
        (
            f"{name}, which is gathered again for each use",
            *lines,
            "The change would be lost.",
            "hint: update the sharded parameter outside of forward and backward, or change parameter.clone()",
        )
    )
