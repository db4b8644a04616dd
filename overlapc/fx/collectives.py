"""Functional collectives made canonical: each launch paired with its wait, and described.

`canonicalize` leaves a graph in which

- every collective is a `_c10d_functional` op whose result is read only through one `wait_tensor` (one an output
  for the coalesced, list-valued forms),
- nothing waits for what is not in flight, equal gathers exist once, and gradients of one parameter are added up
  before they are reduced,
- `_dtensor.shard_dim_alltoall`, in-place forms, point-to-point and custom ops stay as they are: they wait for
  themselves, or we do not know (`Collective.waits` is empty). The first is known to be a collective and its wait and no
  more; the scheduler takes the others as barriers, unless the user calls them safe.

`find_collectives` lists them with what each moves, over a group name that is equal on all ranks.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.distributed_c10d import _resolve_process_group

from overlapc.errors import CompileError
from overlapc.fx.control import done
from overlapc.fx.gathers import merge_gathers, merge_reductions
from overlapc.fx.labels import ParamLabel, label_of
from overlapc.fx.subgraphs import nodes_within
from overlapc.fx.versions import group_name_of, size_hint
from overlapc.schedule.model import Comm

_c10d = torch.ops._c10d_functional
_WAIT = _c10d.wait_tensor.default
_VIEWS: frozenset[Any] = frozenset(
    {torch.ops.aten.view.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default}
)
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "shard_dim_alltoall": "all_to_all",
}
# Of the last three we know no op; all of them communicate.
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "c10d_functional", "symm_mem")
_SELF_WAITING = frozenset({"_dtensor::shard_dim_alltoall"})  # launch, wait and nothing else
_NOT_COMMUNICATION = ("wait_tensor", "_wrap_tensor_autograd", "mesh_get_process_group")


@dataclass(frozen=True, slots=True)
class Collective:
    """One launch in a graph."""

    start: fx.Node
    waits: tuple[fx.Node, ...]  # one an output, in output order; empty when it waits for itself
    comm: Comm
    label: ParamLabel | None  # the sharded parameter it serves, if any

    @property
    def synchronous(self) -> bool:
        """Whether the launch itself blocks, so that nothing can hide it."""
        return not self.waits


def is_collective(node: fx.Node) -> bool:
    """Whether `node` launches communication, known to us or not; a conditional whose branch does launches it too.

    A custom op does if it takes the name of a process group (`group_name`), as torch's own do.
    """
    namespace, name = _op(node)
    if namespace in _NAMESPACES:
        return name not in _NOT_COMMUNICATION
    if namespace not in ("", "aten", "prims") and group_of(node) is not None:
        return True
    return any(is_collective(inner) for inner in nodes_within(node))


def is_wait(node: fx.Node) -> bool:
    """Whether `node` blocks until a collective is done."""
    return node.target is _WAIT


def is_asynchronous(node: fx.Node) -> bool:
    """Whether `node` launches a collective of known kind that somebody must wait for."""
    namespace, name = _op(node)
    in_place = name.endswith(("_", "_out"))
    return namespace == "_c10d_functional" and _base(name) in _KINDS and not in_place


def kind_of(node: fx.Node) -> str:
    """What `schedule.model.Comm.collective` calls it; "unknown" for point-to-point and new ops."""
    return _KINDS.get(_base(_op(node)[1]), "unknown")


def canonicalize(graph_module: fx.GraphModule) -> int:
    """Bring all collectives of the graph into the form above; returns how many nodes were changed."""
    graph = graph_module.graph
    changed = _plain_ops(graph) + _drop_identity_views(graph)
    changed += _one_wait_each(graph)
    changed += merge_gathers(graph)
    changed += merge_reductions(graph)
    changed += _drop_unread(graph)
    if changed:
        graph.lint()
        graph_module.recompile()
    return changed


def find_collectives(graph: fx.Graph, safe: frozenset[str] = frozenset()) -> list[Collective]:
    """Every launch of a canonical graph, in order. `safe`: ops (`namespace::name`) that others may cross."""
    names = GroupNames(graph)
    return [
        Collective(node, tuple(_waits(node)), describe(node, names, safe), label_of(node))
        for node in graph.nodes
        if is_collective(node)
    ]


def describe(node: fx.Node, names: GroupNames, safe: frozenset[str] = frozenset()) -> Comm:
    """What `node` moves, by its collective's own definition: a gather its output, a scatter its input."""
    kind = kind_of(node)
    group = group_of(node)
    if kind in ("all_gather", "all_to_all"):
        moved = _tensors(node.meta.get("val"))
    else:
        moved = _tensors(node.args if kind == "unknown" else node.args[0])
    if not moved and kind != "unknown":
        raise CompileError(f"{node.name}: {node.target} has no tensor metadata to size it by")
    ranks = names.ranks(group) if group else ()
    return Comm(
        collective=kind,
        bytes=sum(size_hint(tensor.numel()) * tensor.element_size() for tensor in moved),
        group=names[group] if group else "unknown",
        size=len(ranks),
        dtype=str(moved[0].dtype).removeprefix("torch.") if moved else "",
        ranks=ranks,
        unit=unit_of(label_of(node)),
        safe=not is_asynchronous(node) and "::".join(_op(node)) in safe | _SELF_WAITING,
    )


def unit_of(label: ParamLabel | None) -> str:
    """What a parameter is gathered with, for `Comm.unit`: the module that `fully_shard` was given."""
    return "" if label is None else label.group or "root"


def group_of(node: fx.Node) -> str | None:
    """This rank's name of the process group that a collective runs on, or None if it names none."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "group_name":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("group_name")
            return group_name_of(given)
    return None


def ranks_of(group: str) -> tuple[int, ...]:
    """Global ranks of a process group by its name."""
    return tuple(dist.get_process_group_ranks(_resolve_process_group(group)))  # type: ignore[arg-type]


class GroupNames:
    """Names of a graph's process groups that are equal on all ranks, and differ between groups.

    torch's own names count up per process and so differ between ranks. A group is called by, in this order:
    the mesh axis that `fully_shard` wrote on its nodes; the axis that `DeviceMesh` wrote into the group's
    description; "world"; its shape, such as "2x4" for two ranks that are four apart. Of two groups with the
    same axis name all but the first (in graph order, which ranks share) get their shape appended: "tp.2x4".
    """

    def __init__(self, graph: fx.Graph) -> None:
        axis_of: dict[str, str] = {}
        order: dict[str, None] = {}
        for node in graph.nodes:
            group = group_of(node) if is_collective(node) else None
            if group is None:
                continue
            order.setdefault(group)
            label = label_of(node)
            if label is not None:
                axis = label.replicate_axis if kind_of(node) == "all_reduce" else label.axis
                if group == label.post_group:
                    axis = f"{label.axis}_post"
                axis_of.setdefault(group, axis)
        self._names: dict[str, str] = {}
        self._ranks = {group: ranks_of(group) for group in order}
        taken: dict[str, int] = {}
        for group in order:
            name = axis_of.get(group) or _described(group)
            count = taken.get(name, 0)
            taken[name] = count + 1
            if count:
                name = f"{name}.{_shape(group)}" + (f".{count}" if count > 1 else "")
            self._names[group] = name

    def __getitem__(self, group: str) -> str:
        """The name of a group, by torch's name for it; KeyError for one that the graph does not use."""
        return self._names[group]

    def ranks(self, group: str) -> tuple[int, ...]:
        """Global ranks of a group; KeyError likewise."""
        return self._ranks[group]


def _described(group: str) -> str:
    description = _resolve_process_group(group).group_desc  # type: ignore[arg-type]
    if description.startswith("mesh_") and description != "mesh_default":
        return description.removeprefix("mesh_")
    return "world" if len(ranks_of(group)) == dist.get_world_size() else _shape(group)


def _shape(group: str) -> str:
    ranks = ranks_of(group)
    strides = {after - before for before, after in itertools.pairwise(ranks)}
    return f"{len(ranks)}x{strides.pop()}" if len(strides) == 1 else f"{len(ranks)}"


def _op(node: fx.Node) -> tuple[str, str]:
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace, node.target._opname
    return "", ""


def _base(name: str) -> str:
    return name.removesuffix("_").removesuffix("_out").removesuffix("_coalesced")


def _tensors(value: Any) -> list[Tensor]:
    """The (fake) tensors behind a node, a list of nodes, or a meta value."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _outputs(start: fx.Node) -> list[fx.Node]:
    """The nodes that hold one tensor each: the start itself, or the parts of a coalesced one in order."""
    if not isinstance(start.meta.get("val"), (list, tuple)):
        return [start]
    parts = [user for user in start.users if user.target is operator.getitem]
    return sorted(parts, key=_part_index)


def _part_index(part: fx.Node) -> int:
    index = part.args[1]
    assert isinstance(index, int)
    return index


def _waits(start: fx.Node) -> Iterator[fx.Node]:
    if is_asynchronous(start):
        for output in _outputs(start):
            yield from (user for user in output.users if is_wait(user))


def _plain_ops(graph: fx.Graph) -> int:
    """Below autograd an op of the autograd namespace, where one survived tracing, is the plain one."""
    changed = 0
    for node in graph.nodes:
        namespace, name = _op(node)
        if namespace == "_c10d_functional_autograd":
            node.target = getattr(_c10d, name).default
            changed += 1
    return changed


def _drop_identity_views(graph: fx.Graph) -> int:
    """A view with its input's shape says nothing; `DTensor.to_local` leaves one before every gather."""
    changed = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        source = node.args[0]
        if any(user.op == "output" for user in node.users):
            continue  # AOTAutograd has already decided which outputs alias which inputs
        before, after = source.meta.get("val"), node.meta.get("val")
        if isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            changed += 1
    return changed


def _launch_of(value: Any) -> Any:
    """The launch whose result `value` is, when it is a part of a coalesced one; else `value`."""
    return value.args[0] if isinstance(value, fx.Node) and value.target is operator.getitem else value


def _settled(node: fx.Node) -> bool:
    """Whether nothing can be in flight behind `node`, as it was waited for or computed.

    Anything else may be: inputs may have been launched before the graph, and custom ops may launch.
    """
    return is_wait(node) or _op(node)[0] in ("aten", "prims")


def _one_wait_each(graph: fx.Graph) -> int:
    changed = 0
    for node in list(graph.nodes):
        if not is_wait(node):
            continue
        source = node.args[0]
        while source.target in _VIEWS:
            source = source.args[0]
        # The wait of a viewed launch is added below, before the view.
        launch = _launch_of(source)
        if _settled(launch) or (source is not node.args[0] and is_asynchronous(launch)):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            changed += 1
    for start in list(graph.nodes):
        if is_asynchronous(start):
            changed += sum(_wait_once(graph, output) for output in _outputs(start))
    first_wait: dict[fx.Node, fx.Node] = {}  # of an input, which may be read without waiting, too
    for node in list(graph.nodes):
        if is_wait(node) and node.args[0].op == "placeholder":
            first = first_wait.setdefault(node.args[0], node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
                changed += 1
    return changed


def _wait_once(graph: fx.Graph, output: fx.Node) -> int:
    """Let everything that reads `output` read it through one wait, right behind it unless there was only that."""
    users = [user for user in output.users if user.target is not done]  # that it was launched is all `done` needs
    if not users or (len(users) == 1 and is_wait(users[0])):
        return 0
    with graph.inserting_after(output):
        wait = graph.call_function(_WAIT, (output,))
    wait.meta = dict(output.meta)
    output.replace_all_uses_with(wait, delete_user_cb=lambda user: user is not wait and user.target is not done)
    for old in users:
        if is_wait(old):
            wait.meta = dict(old.meta)
            old.replace_all_uses_with(wait)
            graph.erase_node(old)
    return 1


def _drop_unread(graph: fx.Graph) -> int:
    """Collectives that nobody reads are not worth running; ranks share the graph, so all drop the same ones.

    torch keeps waits alive as side effects. Of a functional launch a wait's only effect is its result; of one that
    works in place it is what readers of the mutated tensor rely on, so that stays.
    """
    changed = 0
    for node in reversed(list(graph.nodes)):
        of_launch = is_wait(node) or node.target is operator.getitem
        launch = _launch_of(node.args[0]) if of_launch else node
        if not node.users and isinstance(launch, fx.Node) and is_asynchronous(launch):
            graph.erase_node(node)
            changed += 1
    return changed
