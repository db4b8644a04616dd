"""Labels for parameters that were not sharded by `overlapc.fully_shard`: FSDP that a user wrote with DTensors.

    %w = wait(all_gather(cast(%parameter)))              a gather of a graph input behind casts and views
    return cast(wait(reduce_scatter(%gradient)))         a reduction whose result is returned behind casts and views

Such a chain gets the label that `fully_shard` would have written, with the block that its module belongs to as the
group. Packing and bucketing (fx/comm/pack.py, passes/bucket.py) then treat both alike. Labels are inferred after torch
has partitioned the joint graph, so the user still decides which parameters are gathered again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from overlapc.fx.comm.gathers import CARRIERS
from overlapc.fx.comm.labels import ParamLabel, label_of, put_label
from overlapc.fx.source import block_of, module_path

aten, _c10d = torch.ops.aten, torch.ops._c10d_functional

_REDUCTIONS = (_c10d.reduce_scatter_tensor.default, _c10d.all_reduce.default)
_SCALES = frozenset({aten.div.Tensor, aten.div.Scalar, aten.mul.Tensor, aten.mul.Scalar})
NO_MODULE = "parameters"  # the group of chains whose tracer recorded no module


def infer_labels(graph: fx.Graph) -> int:
    """Label the unlabelled chains of parameters in a canonical graph; return the number of labelled chains."""
    labelled = 0
    for start in graph.nodes:
        if label_of(start) is not None:
            continue
        if start.target is _c10d.all_gather_into_tensor.default:
            chain = _gather_of_an_input(start)
        elif start.target in _REDUCTIONS:
            chain = _reduction_to_an_output(start)
        else:
            continue
        if chain:
            group = block_of(module_path(start)) or NO_MODULE
            for node in chain:
                put_label(node, ParamLabel(group, start.name, axis=""))
            labelled += 1
    return labelled


def _gather_of_an_input(start: fx.Node) -> list[fx.Node]:
    """Return the nodes from a graph input to the wait for its gather; empty unless casts and views alone precede it."""
    chain = [start, *(user for user in start.users if user.target is _c10d.wait_tensor.default)]
    node = start.args[0]
    while isinstance(node, fx.Node) and node.target in CARRIERS:
        chain.append(node)
        node = node.args[0]
    return chain if isinstance(node, fx.Node) and node.op == "placeholder" else []


def _reduction_to_an_output(start: fx.Node) -> list[fx.Node]:
    """Return a reduction and the nodes from it to an output; empty unless these only move, cast or scale its result."""
    chain = [start]
    for user in _behind(start):
        if user.op == "output":
            continue
        moves = user.target in CARRIERS or user.target in _SCALES or user.target is _c10d.wait_tensor.default
        if not moves or len(user.all_input_nodes) != 1:
            return []
        chain.append(user)
    return chain


def _behind(start: fx.Node) -> Iterator[fx.Node]:
    """Yield the direct and indirect users of `start`, each once."""
    seen = {start}
    pending = list(start.users)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending.extend(node.users)
