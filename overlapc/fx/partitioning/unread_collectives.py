"""Keeps collectives whose results are not read, which torch's partitioner would remove.

Another rank may read the result, for example to log it, and would wait for this rank. Whether all ranks agree that they
may remove such a collective is known only when the graph is planned (planning/plan_graph.py). Until torch has divided
the joint graph, the results are among its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from overlapc.fx.comm.communication import is_wait
from overlapc.fx.partitioning.recompute import backward_nodes
from overlapc.fx.versions.graphs import belongs_to_backward


@dataclass(frozen=True)
class Unread:
    """The number of unread results among the outputs of forward, behind its own, and at the end of backward's."""

    forward: int
    backward: int

    def no_longer_returned(self, forward: fx.Graph, backward: fx.Graph, forward_outputs: int) -> None:
        """Remove them from the outputs of both graphs."""
        _replace_outputs(forward, forward_outputs, self.forward)
        _replace_outputs(backward, len(_outputs(backward)) - self.backward, self.backward)


def return_unread(joint: fx.Graph, forward_outputs: int) -> Unread:
    """Return the results of collectives that nothing reads from the part of the joint graph that computes them."""
    in_backward = backward_nodes(joint)
    unread = [node for node in joint.nodes if is_wait(node) and not node.users]
    of_backward = {node: node in in_backward or belongs_to_backward(node) for node in unread}
    late = [node for node in unread if of_backward[node]]
    early = [node for node in unread if not of_backward[node]]
    _replace_outputs(joint, len(_outputs(joint)), 0, late)
    _replace_outputs(joint, forward_outputs, 0, early)
    return Unread(len(early), len(late))


def _outputs(graph: fx.Graph) -> Sequence[Any]:
    (returned,) = graph.output_node().args
    assert isinstance(returned, Sequence)
    return returned


def _replace_outputs(graph: fx.Graph, at: int, count: int, by: Sequence[fx.Node] = ()) -> None:
    """Replace `count` outputs from position `at` on, with what torch notes about each."""
    output = graph.output_node()
    output.args = ((*_outputs(graph)[:at], *by, *_outputs(graph)[at + count :]),)
    for key in ("desc", "output_stack_traces"):
        notes = output.meta.get(key)
        if notes is not None:
            output.meta[key] = [*notes[:at], *(None for _ in by), *notes[at + count :]]
