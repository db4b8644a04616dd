"""Backward reads inputs that forward changes as eager does: as they were before the change, from a copy.

AOTAutograd writes a changed input back at the end of forward (`copy_`), or its wrapper does (an input that takes part
in autograd). torch's partitioner takes inputs for constants: it lets backward compute from the input itself, which
then holds another value. Gradients of aot_eager and Inductor are wrong there.

    forward: y = sin(x) * w; copy_(x, x + 1)                             backward: grad * sin(x)
 -> forward: y = sin(x) * w; before = clone(x); copy_(x, x + 1)          backward: grad * sin(before)

Changes through `x.data` are kept from autograd: in eager, what it saved is then what these made of it. So backward's
own reads stay reads of the input itself; what forward computed is computed of the copy there, too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from overlapc.fx.arguments import declared_arguments, is_written
from overlapc.fx.duplicates import storage_of
from overlapc.fx.node_writer import NodeWriter
from overlapc.fx.versions import belongs_to_backward, inputs_changed_unseen, inputs_written_after

aten = torch.ops.aten


def copy_changed_inputs(joint: fx.Graph, forward_outputs: int) -> dict[str, str]:
    """Makes what a joint graph computes of an input that forward changes be computed of a copy of that input.

    Returns the name of the input by the name of its copy. torch's partitioner saves the copy, or what is computed of
    it, where backward needs it: a copy is never made again.
    """
    inputs = joint.find_nodes(op="placeholder")
    output = joint.output_node()
    order = {node: at for at, node in enumerate(joint.nodes)}
    written_after, unseen = inputs_written_after(joint), inputs_changed_unseen(joint)
    copies: dict[str, str] = {}
    for node in inputs:
        first = min((order[write] for write in writes_of(node) if not belongs_to_backward(write)), default=None)
        if first is None:
            if node not in written_after:
                continue
            first = order[output]
        readers = [
            user for user in node.users if order[user] < first and not (node in unseen and belongs_to_backward(user))
        ]
        results = list(output.args[0])  # type: ignore[arg-type]
        gradients = [at for at in range(forward_outputs, len(results)) if results[at] is node and node not in unseen]
        if not readers and not gradients:
            continue
        copy = NodeWriter(inputs[-1].next, node).call(aten.clone.default, node)
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # to the partitioner: never to be computed again
        for reader in readers:
            reader.replace_input_with(node, copy)
        for at in gradients:
            results[at] = copy
        output.args = (results,)
        copies[copy.name] = node.name
    return copies


def drop_copies(forward: fx.Graph, forward_outputs: int, copies: dict[str, str]) -> None:
    """Lets `forward` read its inputs themselves where they still hold what the copies hold.

    What is saved for backward stays a copy, or a view of one.
    """
    named = {node.name: node for node in forward.nodes}
    order = {node: at for at, node in enumerate(forward.nodes)}
    for copy_name, input_name in copies.items():
        copy, given = named.get(copy_name), named[input_name]
        if copy is None:
            continue
        first = min((order[write] for write in writes_of(given)), default=len(order))
        saved = _behind_saved(forward, forward_outputs, storage_of(given))
        for reader in list(copy.users):
            if reader.op != "output" and reader not in saved and order[reader] < first:
                reader.replace_input_with(copy, given)
        if not copy.users:
            forward.erase_node(copy)


def _behind_saved(forward: fx.Graph, forward_outputs: int, memory: int | None) -> set[fx.Node]:
    """The nodes whose values lie in the `memory` that was traced for an input, and that saved values are views of."""
    found: set[fx.Node] = set()
    pending = [value for value in forward.output_node().args[0][forward_outputs:] if isinstance(value, fx.Node)]  # type: ignore[index,union-attr]
    while pending:
        node = pending.pop()
        if node not in found and storage_of(node) == memory is not None:
            found.add(node)
            pending += node.all_input_nodes
    return found


def writes_of(given: fx.Node) -> Iterable[fx.Node]:
    """The nodes that change the memory of `given`."""
    for user in given.users:
        arguments = declared_arguments(user.target, user.args, user.kwargs)
        if any(value is given and is_written(declared) for declared, value in arguments):
            yield user
