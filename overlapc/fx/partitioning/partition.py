"""Split the joint graph into forward and backward, with a policy for parameter gathers.

    partition_fn = overlapc.fx.partitioning.partition.partition      # for AOTAutograd

torch's min-cut decides which values are saved and which are recomputed, except for these, which are fixed here:

- If a group reshards after forward, the gathers of its parameters are always recomputed, with their casts and views:
  the gathered parameter is never saved. If it does not, or the gather is in `keep`, the gather is never recomputed, not
  even inside a checkpoint. On one rank, where nothing is gathered, the casts of such parameters are recomputed.
- `reshard_after_forward=int`: this rank's part of the gathered parameter is saved, and backward gathers that over
  the smaller group.
- Other collectives and matmuls are recomputed only under the user's checkpointing (torch's own rules).
- float32 values computed element by element from smaller ones, and every other sum of gated residuals, are not saved
  (fx/partitioning/recompute.py). Of a view, the base is saved: backward then knows which of its inputs share memory,
  and the plan counts that memory once.
- Sizes that backward's arguments are made of are saved, too (fx/partitioning/saved_sizes.py).
- A collective whose result nothing reads stays, because another rank may read it
  (overlapc/fx/partitioning/unread_collectives.py).
- An input that forward changes is saved as a copy from before the change (overlapc/fx/partitioning/changed_inputs.py).
- Sums, and other values whose bits depend on the kernel that computes them, are saved if the graph compares them, also
  inside a checkpoint (overlapc/fx/partitioning/compared.py).

Recomputed gathers are placed before their first use, because torch orders backward by the nodes each gradient needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from overlapc.fx.captured.drawn import draw_early, draw_late
from overlapc.fx.comm.canonical import canonicalize
from overlapc.fx.comm.gathers import Gather, parameter_gathers, whole_parameter_casts
from overlapc.fx.node_writer import NodeWriter
from overlapc.fx.partitioning.changed_inputs import copy_changed_inputs, drop_copies
from overlapc.fx.partitioning.compared import save_compared_values
from overlapc.fx.partitioning.duplicates import merge_duplicates
from overlapc.fx.partitioning.minimum_cut import cut_in_parts
from overlapc.fx.partitioning.recompute import backward_nodes, recompute_expansions, recompute_sums
from overlapc.fx.partitioning.rng_state import describe, put_states_before_objects, unwrap_attention
from overlapc.fx.partitioning.saved_sizes import save_sizes
from overlapc.fx.partitioning.unread_collectives import return_unread
from overlapc.fx.precision import note_coarse
from overlapc.fx.random import draw_once
from overlapc.fx.versions.changes import costs_of_saving
from overlapc.fx.versions.graphs import return_no_tangents
from overlapc.fx.zero_tensors import keep_products_zero

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def partition(
    joint_module: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    keep: Collection[str] = (),
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split `joint_module` into (forward, backward); its collectives are made canonical first.

    keep: names of gathers whose results are saved although their groups reshard. `options` are passed to torch's
    partitioner (`static_lifetime_input_indices`).
    """
    return_no_tangents(joint_module.graph, num_fwd_outputs)
    canonicalize(joint_module)
    draw_once(joint_module.graph)
    keep_products_zero(joint_module.graph)
    draw_late(joint_module.graph)
    joint_module.graph.eliminate_dead_code()  # else dead nodes would count as users
    regathered: dict[str, str] = {}  # name of the wait of backward's gather -> name of the wait of forward's gather
    for gather in list(parameter_gathers(joint_module.graph)):
        if not gather.wait.users:
            continue
        if gather.label.post_size:
            regathered.update(_gather_from_part(gather))
        elif gather.label.reshard and gather.start.name not in keep:
            _mark(gather.nodes, CheckpointPolicy.MUST_RECOMPUTE)
        else:
            _mark(gather.nodes, None)  # torch saves the results of collectives without a policy
    for label, cast in whole_parameter_casts(joint_module.graph):
        if label.reshard:  # on one rank: saving the cast would keep a second copy of the parameter
            _mark(cast, CheckpointPolicy.MUST_RECOMPUTE)
    copies = copy_changed_inputs(joint_module.graph, num_fwd_outputs)
    backward_part = backward_nodes(joint_module.graph)
    recompute_expansions(joint_module.graph, backward_part)
    recompute_sums(joint_module.graph, backward_part)
    save_compared_values(joint_module.graph, backward_part)
    if torch._functorch.config.cse:
        merge_duplicates(joint_module.graph)
    note_coarse(joint_module.graph)
    # With `graphsafe_rng_functionalization`, generators become inputs of the graphs; only CUDA graphs over library
    # calls that draw random numbers need that.
    options_of_torch = torch._functorch.config.patch(
        graphsafe_rng_functionalization=False, cse=False, recompute_views=True
    )
    unread = return_unread(joint_module.graph, num_fwd_outputs)
    with options_of_torch, cut_in_parts(), costs_of_saving():
        forward, backward = min_cut_rematerialization_partition(
            joint_module, joint_inputs, num_fwd_outputs=num_fwd_outputs + unread.forward, **options
        )
    unread.no_longer_returned(forward.graph, backward.graph, num_fwd_outputs)
    put_states_before_objects(forward, backward, num_fwd_outputs)
    draw_early(backward.graph)
    drop_copies(forward.graph, num_fwd_outputs, copies)
    save_sizes(forward, backward, num_fwd_outputs)
    unwrap_attention(forward, backward)
    for graph in (forward, backward):
        describe(graph)
    if regathered:
        _skip_regather(forward, regathered)
    return forward, backward


def gathered_again(backward: fx.Graph) -> frozenset[str]:
    """Return the names of the gathers in a backward graph that `keep` can avoid: those over all ranks of a group."""
    return frozenset(each.start.name for each in parameter_gathers(backward) if not each.label.post_size)


def _mark(nodes: Iterable[fx.Node], policy: CheckpointPolicy | None) -> None:
    """Set `policy` on all `nodes` of a parameter's gather, overriding that of a surrounding checkpoint.

    The checkpoint's id is removed, too, because torch saves values that one checkpoint computes and a later one reads:
    it would save a gathered parameter that two checkpoints share.
    """
    for node in nodes:
        node.meta.pop("ac_graph_id", None)
        node.meta.pop("recompute", None)
        if policy is not None:
            node.meta["recompute"] = policy


def _gather_from_part(gather: Gather) -> dict[str, str]:
    """Insert, behind a gather, the part to save and a gather of that part, and let all users read the latter.

        w = wait(all_gather(shard))  ->  w = ...; part = clone(w[this rank's rows]); w2 = wait(all_gather(part))

    After partitioning, forward reads w again (`_skip_regather`).
    """
    label, wait = gather.label, gather.wait
    rows = wait.meta["val"].shape[0] // label.post_size
    users = tuple(wait.users)

    write = NodeWriter(wait.next, wait)
    rows_of_rank = write.call(aten.slice.Tensor, wait, 0, label.post_rank * rows, (label.post_rank + 1) * rows)
    part = write.call(aten.clone.default, rows_of_rank)  # a slice would keep the whole parameter alive
    start = write.call(_c10d.all_gather_into_tensor.default, part, label.post_size, label.post_group)
    again = write.call(_c10d.wait_tensor.default, start)
    for user in users:
        user.replace_input_with(wait, again)
    _mark((*gather.before, gather.start, wait, rows_of_rank), None)
    part.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    _mark((start, again, *gather.after), CheckpointPolicy.MUST_RECOMPUTE)
    return {again.name: wait.name}


def _skip_regather(forward: fx.GraphModule, regathered: dict[str, str]) -> None:
    """Let forward read the parameter that it gathered from all ranks, and remove its gather of the saved part."""
    by_name = {node.name: node for node in forward.graph.nodes}
    for again_name, wait_name in regathered.items():
        again = by_name.get(again_name)
        if again is None:
            continue
        again.replace_all_uses_with(by_name[wait_name])
        start = again.args[0]
        assert isinstance(start, fx.Node)
        forward.graph.erase_node(again)
        forward.graph.erase_node(start)
    forward.recompile()


__all__ = ["gathered_again", "partition"]
