"""Chooses the transport of each collective of a graph (`transport=`), and records why copies were not used.

The gathers, or the reductions, of a unit of `fully_shard` use copies where the profile's times of copies are shorter;
with a profile without such times they use the process group's library. A collective of a group that spans several hosts
is divided: copies within each host, the library across hosts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from overlapc.codegen.copies import Copied, Copying, copying
from overlapc.fx.comm.collectives import Collective, find_collectives
from overlapc.fx.comm.communication import group_of
from overlapc.fx.comm.exchange import RankInGroup, exchange_reductions, gather_by_hosts
from overlapc.planning.copy_rules import AgreedCopies, CopyRules
from overlapc.planning.host_groups import DividedGroup, divided
from overlapc.planning.transport_costs import REDUCTIONS, Hosts, Unit, as_copies, unit_of, units_faster_by_library
from overlapc.runtime.copies.layout import common, from_text, to_text
from overlapc.runtime.copies.pool import Pool, open_pools, reusable_pools
from overlapc.schedule.collective_kinds import COPY
from overlapc.schedule.model import Schedule

GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


@dataclass(frozen=True)
class Transports:
    """The transports of one graph, the same on all ranks that compile it. Without rules, all use the library."""

    collectives: Sequence[Collective] = ()  # each with its transport
    rules: CopyRules | None = None
    rewritten: bool = False  # collectives of the graph were replaced by others that copies can carry
    library_units: frozenset[Unit] = frozenset()  # units that cost less with the group's library
    divided: Mapping[str, DividedGroup] = field(default_factory=dict)  # torch's name of a divided group -> its parts
    groups: Mapping[str, str] = field(default_factory=dict)  # `Comm.group` of a collective with copies -> torch's name
    reasons: Mapping[str, str] = field(default_factory=dict)  # FX node of a collective without copies -> why

    @classmethod
    def chosen(cls, gm: GraphModule, safe: frozenset[str], rules: CopyRules | None) -> Transports:
        """Choose the transports of a canonical graph; collectives that copies carry are rewritten first.

        safe: see `Config.safe_communication`.
        """
        if rules is None or rules.reach.none:
            return cls(rules=rules).for_changed(gm, safe)
        found = find_collectives(gm.graph, safe)
        hosts = {collective.start: rules.hosts(collective) for collective in found}
        library_units: frozenset[Unit] = frozenset()
        if rules.followed is not None:
            library_units = rules.followed.library_units
        elif rules.profile is not None:
            replaced = [(collective.comm, as_copies(collective, hosts[collective.start])) for collective in found]
            library_units = units_faster_by_library(replaced, rules.profile)
        places, divided_groups = _places(found, hosts, rules, library_units)
        rewritten = _rewrite(gm, places)
        transports = cls(rules=rules, rewritten=rewritten, library_units=library_units, divided=divided_groups)
        return transports.for_changed(gm, safe)

    def for_changed(self, gm: GraphModule, safe: frozenset[str]) -> Transports:
        """Return the same choice for the collectives of `gm`, which was changed since."""
        found = find_collectives(gm.graph, safe)
        if self.rules is None:
            return replace(self, collectives=found)
        why = {collective.start.name: self._why_not(self.rules, collective) for collective in found}
        carried = [collective for collective in found if not why[collective.start.name]]
        by_copies = {each.start: replace(each, comm=replace(each.comm, via=COPY)) for each in carried}
        return replace(
            self,
            collectives=[by_copies.get(collective.start, collective) for collective in found],
            groups={collective.comm.group: group_of(collective.start) or "" for collective in carried},
            reasons={name: reason for name, reason in why.items() if reason},
        )

    def _why_not(self, rules: CopyRules, collective: Collective) -> str | None:
        if unit_of(collective.comm) in self.library_units:
            return "the group's library is faster for this size"
        return rules.reach.none or rules.why_not(collective)

    def opened(self, schedule: Schedule) -> tuple[Mapping[str, Copied], AgreedCopies | None]:
        """Lay out memory for copies, agree on it, and map it into all ranks.

        Return for each start that uses copies how generated code runs it, and what ranks agreed on.
        """
        rules = self.rules
        if rules is None or rules.reach.none or rules.device is None:
            return {}, None
        graph = copying(schedule)
        if not graph.starts:  # the same on all ranks, as the order of collectives is
            return {}, None
        if rules.followed is not None:
            pools = self._open_pools(graph, rules.followed)
            assert pools is not None, "`fits` returned True"
            return graph.on(rules.followed.layouts, pools), rules.followed
        agreement = rules.agreement
        assert agreement is not None, "`reach.none` is set without an agreement"
        mine = {group: to_text(each.events) for group, each in graph.groups.items()}
        texts = agreement.exchange("slots for copies", json.dumps(mine))
        events = dict(zip(agreement.ranks, map(json.loads, texts), strict=True))
        layouts = {
            group: common([from_text(events[rank][group]) for rank in graph.ranks(group)]) for group in graph.groups
        }
        with unset_fake_temporarily():  # in fake mode, operations on the memory would be traced instead of executed
            wanted = graph.wanted(layouts, self.groups)
            opened = open_pools(wanted, rules.device, agreement.ranks, agreement.exchange, rules.cache_dir)
        agreed = AgreedCopies(
            rules.device, rules.reach.places, layouts, self.library_units, frozenset(), rules.over_hosts
        )
        return graph.on(layouts, opened), agreed

    def fits(self, schedule: Schedule) -> bool:
        """Whether the schedule can use the copy layouts of the graph that it follows."""
        followed = None if self.rules is None else self.rules.followed
        graph = copying(schedule)
        if followed is None:
            return not graph.starts
        return not followed.layouts if not graph.starts else self._open_pools(graph, followed) is not None

    def _open_pools(self, graph: Copying, followed: AgreedCopies) -> Mapping[str, Pool] | None:
        """Return the open pools that ranks agreed on; None if the graph does not fit their layouts."""
        if graph.broken(followed.layouts) is not None:
            return None
        return reusable_pools(graph.wanted(followed.layouts, self.groups), followed.device)


def _places(
    found: Sequence[Collective], hosts: Mapping[Node, Hosts | None], rules: CopyRules, library_units: frozenset[Unit]
) -> tuple[Mapping[Node, RankInGroup], Mapping[str, DividedGroup]]:
    """Return this rank's place in the groups of each collective that is rewritten, and the groups that are divided."""
    places: dict[Node, RankInGroup] = {}
    divided_groups: dict[str, DividedGroup] = {}
    for collective in found:
        start, comm, hosts_here = collective.start, collective.comm, hosts[collective.start]
        rewritable = comm.collective in (*REDUCTIONS, "all_gather") and comm.group not in rules.library_groups
        if hosts_here is None or unit_of(comm) in library_units or not rewritable:
            continue
        if len(hosts_here) == 1:
            places[start] = RankInGroup(comm.ranks.index(dist.get_rank()), comm.size)
            continue
        group = group_of(start) or ""
        groups = divided(group, comm.group, hosts_here, alone=rules.followed is not None)
        if groups is None:
            continue
        divided_groups[group] = DividedGroup(group, comm.group, tuple(comm.ranks), groups)
        own = groups.ranks_within.index(dist.get_rank())
        size = len(groups.ranks_within)
        places[start] = RankInGroup(own, size, len(hosts_here), groups.within, groups.across)
    return places, divided_groups


def _rewrite(gm: GraphModule, places: Mapping[Node, RankInGroup]) -> bool:
    """Rewrite collectives so that copies can carry them: a reduction as an exchange and a sum, a collective of a group
    that spans several hosts as one within each host and one across hosts. Return whether anything was rewritten."""
    gathers = [start for start, place in places.items() if start.target is GATHER and place.hosts > 1]
    for start in gathers:
        gather_by_hosts(start, places[start])
    return exchange_reductions(gm, places.get) > 0 or bool(gathers)
