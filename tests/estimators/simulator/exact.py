"""The shortest step over all legal orders of a small schedule, found by a constraint solver (CP-SAT).

There is no contention and launches are free; times are whole ns, at least one for a launched node. The compute stream
runs one node at a time, and starts, waits and views take no time on it; every queue runs its collectives in the order
in which they were issued.
"""

from __future__ import annotations

from typing import Any

from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Why
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Kind, Node, Schedule

_TICKS = 1000  # solver ticks per ns, so that "just before" costs less than a ns
_ON_STREAM = (*COMPUTE, Kind.COMM)
_ON_QUEUE = COMMUNICATION


def optimum(schedule: Schedule, *, seconds: float = 20.0) -> tuple[int, Schedule]:
    """Return the least step in whole ns and its order; the order of collectives is free, as for the bound."""
    from ortools.sat.python import cp_model  # imports pandas, which collecting the tests should not do

    model = cp_model.CpModel()
    horizon = sum(map(_ticks, schedule.nodes)) + 1
    stream = []
    begins, ends = [], []  # on the compute stream
    for at, node in enumerate(schedule.nodes):
        size = _ticks(node) if node.kind in _ON_STREAM else 0
        begin, end = model.new_int_var(0, horizon, f"b{at}"), model.new_int_var(0, horizon, f"e{at}")
        stream.append(model.new_interval_var(begin, size, end, f"s{at}"))
        begins.append(begin)
        ends.append(end)
    model.add_no_overlap(stream)
    done: dict[int, Any] = {}
    queues: dict[str, list[tuple[int, Any, Any]]] = {}
    for at, node in enumerate(schedule.nodes):
        if node.kind in _ON_QUEUE:
            runs, over = model.new_int_var(0, horizon, f"r{at}"), model.new_int_var(0, horizon, f"o{at}")
            interval = model.new_interval_var(runs, _ticks(node), over, f"q{at}")
            if node.kind is Kind.COMM:
                model.add(runs == begins[at])  # it blocks the stream exactly while it runs
            else:
                model.add(runs >= begins[at])
            queues.setdefault("" if node.comm is None else node.comm.group, []).append((at, runs, interval))
            done[at] = over
    for members in queues.values():
        model.add_no_overlap([interval for _, _, interval in members])
        for number, (one, runs, _) in enumerate(members):
            for other, runs_too, _ in members[:number]:
                first = model.new_bool_var(f"f{one}_{other}")
                model.add(begins[one] < begins[other]).only_enforce_if(first)  # if issued at once, in schedule order
                model.add(runs <= runs_too).only_enforce_if(first)
                # No collective is issued while a blocking collective blocks the stream.
                issued = ends[other] if schedule.nodes[other].kind is Kind.COMM else begins[other]
                model.add(issued <= begins[one]).only_enforce_if(first.negated())
                model.add(runs_too <= runs).only_enforce_if(first.negated())
    for wait, start in schedule.started.items():
        model.add(begins[wait] >= done[start])
    for before, after, why in dependencies.of(schedule).edges():
        if why is not Why.COLLECTIVE_ORDER:
            model.add(begins[after] >= ends[before])
    step = model.new_int_var(0, horizon, "step")
    for end in (*ends, *done.values()):
        model.add(step >= end)
    model.minimize(step)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    assert status == cp_model.OPTIMAL, f"the solver says {solver.status_name(status)} of {schedule}"
    order = sorted(range(len(schedule.nodes)), key=lambda at: (solver.value(begins[at]), solver.value(ends[at]), at))
    names = [schedule.nodes[at].name for at in order]
    return round(solver.objective_value) // _TICKS, schedule.replace_order(names, reorder_collectives=True)


def _ticks(node: Node) -> int:
    if node.estimate is None or node.kind not in (*_ON_STREAM, Kind.START):
        return 0
    return round(node.estimate.ns) * _TICKS
