"""Lets backward read the original values of inputs that forward changes, as in eager, from a copy.

AOTAutograd writes a changed input back at the end of forward (`copy_`), or in its wrapper (for an input that requires
gradients). torch's partitioner treats inputs as constants: it lets backward read the input itself, which then holds
another value. The gradients of aot_eager and Inductor are wrong in this case.

    forward: y = sin(x) * w; copy_(x, x + 1)                             backward: grad * sin(x)
 -> forward: y = sin(x) * w; before = clone(x); copy_(x, x + 1)          backward: grad * sin(before)

Autograd does not know of changes through `x.data`: in eager, a saved tensor has then changed, too. In that case
AOTAutograd lets backward read the changed value, which is a node of its own in the joint graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from overlapc.fx.arguments import declared_arguments, is_written
from overlapc.fx.node_writer import NodeWriter
from overlapc.fx.partitioning.duplicates import storages_of
from overlapc.fx.versions.graphs import belongs_to_backward, inputs_written_after, is_tangent

aten = torch.ops.aten


def copy_changed_inputs(joint: fx.Graph, forward_outputs: int) -> dict[str, str]:
    """Make the nodes of a joint graph that read an input before forward changes it read a copy of the input.

    Return a mapping from the name of each copy to that of its input. torch's partitioner saves the copy, or values
    computed from it, for backward: the copy itself is never recomputed.
    """
    inputs = [node for node in joint.find_nodes(op="placeholder") if not is_tangent(node)]
    output = joint.output_node()
    behind = joint.find_nodes(op="placeholder")[-1].next
    order = {node: at for at, node in enumerate(joint.nodes)}
    written_after = inputs_written_after(joint)
    copies: dict[str, str] = {}
    for node in inputs:
        first = min((order[write] for write in writes_of(node) if not belongs_to_backward(write)), default=None)
        if first is None:
            if node not in written_after:
                continue
            first = order[output]
        readers = [user for user in node.users if order[user] < first]
        results = list(output.args[0])  # type: ignore[arg-type]
        gradients = [at for at in range(forward_outputs, len(results)) if results[at] is node]
        if not readers and not gradients:
            continue
        copy = NodeWriter(behind, node).call(aten.clone.default, node)
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # torch's partitioner must not recompute it
        for reader in readers:
            reader.replace_input_with(node, copy)
        for at in gradients:
            results[at] = copy
        output.args = (results,)
        copies[copy.name] = node.name
    return copies


def drop_copies(forward: fx.Graph, forward_outputs: int, copies: dict[str, str]) -> None:
    """Make `forward` read an input instead of its copy where the input has not changed yet.

    Values saved for backward remain copies, or views of copies.
    """
    named = {node.name: node for node in forward.nodes}
    order = {node: at for at, node in enumerate(forward.nodes)}
    for copy_name, input_name in copies.items():
        copy, given = named.get(copy_name), named[input_name]
        if copy is None:
            continue
        first = min((order[write] for write in writes_of(given)), default=len(order))
        saved = _behind_saved(forward, forward_outputs, storages_of(given))
        for reader in list(copy.users):
            if reader.op != "output" and reader not in saved and order[reader] < first:
                reader.replace_input_with(copy, given)
        if not copy.users:
            forward.erase_node(copy)


def _behind_saved(forward: fx.Graph, forward_outputs: int, memory: set[int]) -> set[fx.Node]:
    """Return the nodes that saved values are, or are views of, if they share the storage `memory` of an input."""
    found: set[fx.Node] = set()
    pending = [value for value in forward.output_node().args[0][forward_outputs:] if isinstance(value, fx.Node)]  # type: ignore[index,union-attr]
    while pending:
        node = pending.pop()
        if node not in found and not memory.isdisjoint(storages_of(node)):
            found.add(node)
            pending += node.all_input_nodes
    return found


def writes_of(given: fx.Node) -> Iterable[fx.Node]:
    """Return the nodes that write into `given`."""
    for user in given.users:
        arguments = declared_arguments(user.target, user.args, user.kwargs)
        if any(value is given and is_written(declared) for declared, value in arguments):
            yield user
