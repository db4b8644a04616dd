"""Turns gathered tensors of a schedule into inputs.

c = kernel(p); a = all_gather(c); w = wait(a); y = kernel(x, w)   ->   y = kernel(x, w) with w as an input
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from overlapc.schedule.model import Buffer, Kind, Node, Schedule


def given_gathered(schedule: Schedule, launches: Collection[str]) -> Schedule:
    """Return `schedule` with the results of `launches` as freeable inputs, without the kernels that become unread."""
    buffers = dict(schedule.buffers)
    for wait, start in schedule.started.items():
        if schedule.nodes[start].name in launches:
            for name in schedule.nodes[wait].writes:
                size = schedule.buffers[schedule.root(name)].bytes
                buffers[name] = Buffer(name, size, is_input=True, freeable=True)
    nodes = [schedule.nodes[at] for at in left_without(schedule, launches)]
    left = {node.name for node in nodes}
    made = {name for node in nodes for name in node.writes}
    return Schedule(
        schedule.name,
        tuple(replace(node, after=tuple(name for name in node.after if name in left)) for node in nodes),
        {name: buffer for name, buffer in buffers.items() if buffer.is_input or name in made},
        schedule.outputs,
        schedule.budget_bytes,
    )


def left_without(schedule: Schedule, launches: Collection[str]) -> list[int]:
    """Return the positions of the nodes that remain if the results of `launches` are inputs of `schedule`.

    This is called for each launch of a schedule, so it visits only the nodes that are removed.
    """
    nodes, producers = schedule.nodes, schedule.producers
    readers = dict(schedule.fact("readers", lambda: _readers(schedule)))
    unread = schedule.fact("unread", lambda: [at for at, node in enumerate(nodes) if _is_unread(node, readers)])
    pending = [*unread, *(at for pair in schedule.started.items() if nodes[pair[1]].name in launches for at in pair)]
    removed: set[int] = set()
    while pending:
        at = pending.pop()
        if at in removed:
            continue
        removed.add(at)
        for name in dict.fromkeys(nodes[at].reads):
            readers[name] -= 1
            producer = producers.get(name)
            if producer is not None and _is_unread(nodes[producer], readers):
                pending.append(producer)
    return [at for at in range(len(nodes)) if at not in removed]


def _readers(schedule: Schedule) -> dict[str, int]:
    """Return how many nodes read each buffer, with the end of the schedule as a reader of its outputs."""
    counted = Counter(name for node in schedule.nodes for name in dict.fromkeys(node.reads))
    counted.update(schedule.outputs)
    return counted


def _is_unread(node: Node, readers: Mapping[str, int]) -> bool:
    """Return whether the node only computes buffers that are not read."""
    return node.kind in (Kind.KERNEL, Kind.VIEW) and not node.mutates and not any(map(readers.get, node.writes))
