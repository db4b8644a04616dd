"""Plans a graph that is not the same on all ranks, but has the same operators and collectives on all of them.

    rank 0: cat([mine, other])    rank 1: cat([other, mine])    each rank puts its own part where its number says
    rank 0: add(x, 16)            rank 1: add(x, s0)            a number that changed on one rank only is a symbol there

What ranks must have in common is the order of their collectives. The first rank plans its graph by itself, and the
others follow its order of launches, as a graph does that one rank recompiles alone (`agreed_order.py`). If dependences
of another graph forbid this order, all launch what the first rank launches in the order of its program.

No collective uses copies, because ranks would lay out their shared memory in different ways. All collectives are kept,
also those whose results this rank does not read: another rank may read them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from overlapc.agreement.rank_agreement import GraphAgreement
from overlapc.errors import RanksDisagree
from overlapc.fx.comm.collectives import Collective, find_collectives
from overlapc.planning.agreed import Captured, Followed, Place, places_of
from overlapc.planning.agreed_order import OrderImpossible, in_order
from overlapc.planning.graph_planner import GraphPlanner, Planned
from overlapc.runtime.counters import count
from overlapc.schedule.collective_kinds import KINDS


def collective_lines(collectives: Sequence[Collective]) -> list[str]:
    """Return what ranks must have in common, one line for each collective; none if the order of a collective is not
    known to be the order of its launch (conditionals, unknown ops).

    Without sizes and names of parameters, which only the ranks of a group have in common (`GraphText.sizes`).
    """
    places = places_of(_captured(collectives), named=False)
    lines = []
    for each in collectives:
        comm = each.comm
        if comm.collective not in KINDS:
            return []
        facts = comm.collective, comm.size, comm.dtype, comm.variant, comm.channels, each.synchronous
        lines.append(f"{places[each.start.name]} {facts}")
    return sorted(lines)


@dataclass(frozen=True)
class UnequalGraph:
    """One rank's side of planning such a graph.

    planner: plans this rank's graph by itself. difference: text that shows where the graphs of ranks differ first.
    """

    planner: GraphPlanner
    agreement: GraphAgreement
    difference: str

    def planned(self) -> Planned:
        """Return this rank's plan; RanksDisagree if its collectives cannot be in one order on all ranks."""
        count("graphs_unlike_those_of_other_ranks")
        alone = replace(self.planner, agreement=None)
        in_program_order = replace(alone, config=replace(alone.config, passes=(), reorder_collectives=False))
        for leader in (alone, in_program_order):
            planned = self._in_one_order(leader, alone)
            if all(self.agreement.exchange("whether the order is possible", "yes" if planned else "")):
                assert planned is not None
                # Without sizes, in which the ranks of other groups may differ.
                order = replace(planned.order, lines=tuple(map(str, _launches_of(planned))))
                self.agreement.agree_on_order(order.lines)
                self._warn()
                return replace(planned, order=order, agreed=order)
        raise RanksDisagree(self.difference)

    def _in_one_order(self, leader: GraphPlanner, alone: GraphPlanner) -> Planned | None:
        """Return this rank's plan in the order of the first rank, which `leader` plans; None if that is impossible."""
        leads = self.agreement.index_and_count[0] == 0
        planned = _if_possible(leader) if leads else None
        launches = "" if planned is None else json.dumps(_launches_of(planned))
        launches = self.agreement.exchange("launches of the first rank", launches)[0]
        if leads or not launches:
            return planned
        places = [[_place(place) for place in members] for members in json.loads(launches)]
        captured = _captured(find_collectives(alone.gm.graph, alone.config.safe_communication))
        order = in_order(places, captured)
        return None if order is None else _if_possible(replace(alone, followed=Followed(order)))

    def _warn(self) -> None:
        if self.agreement.index_and_count[0] == 0:
            shown, _, _ = self.difference.partition("\nhint:")
            warnings.warn(
                f"{shown}\nBecause they have the same collectives, all ranks launch them in the order that is best for"
                f" rank {self.agreement.ranks[0]}, and none of them uses copies."
                "\nhint: give all ranks batches of the same sizes, if sizes of 0 or 1 make the difference",
                stacklevel=2,
            )


def _if_possible(planner: GraphPlanner) -> Planned | None:
    try:
        return planner.planned(communicates=True)
    except OrderImpossible:
        return None


def _captured(collectives: Sequence[Collective]) -> Captured:
    return tuple((each.start.name, each.comm) for each in collectives)


def _launches_of(planned: Planned) -> list[list[Place]]:
    places = places_of(planned.order.collectives, named=False)
    return [[places[member] for member in members] for _, members in planned.order.launches]


def _place(found: Sequence[str | int]) -> Place:
    group, param, kind, number = found
    return str(group), str(param), str(kind), int(number)
