"""Turns gathered tensors of a schedule into inputs.

c = kernel(p); a = all_gather(c); w = wait(a); y = kernel(x, w)   ->   y = kernel(x, w) with w as an input
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from overlapc.schedule.model import Buffer, Kind, Schedule


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
    """Return the positions of the nodes that remain if the results of `launches` are inputs of `schedule`."""
    removed = {at for pair in schedule.started.items() if schedule.nodes[pair[1]].name in launches for at in pair}
    read = set(schedule.outputs)
    left = []
    for at in reversed(range(len(schedule.nodes))):
        node = schedule.nodes[at]
        unread = node.kind in (Kind.KERNEL, Kind.VIEW) and not node.mutates and read.isdisjoint(node.writes)
        if at not in removed and not unread:
            left.append(at)
            read.update(node.reads)
    return left[::-1]
