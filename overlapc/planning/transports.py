"""What carries each collective of a graph (`transport=`), and the reason where copies were asked for but not used.

Copies are slower for little data, as ranks wait for each other's flags. So what a unit of `fully_shard` gathers, or
reduces, goes by copies where these take less, by the profile's times of copies; a profile without any says nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from overlapc.codegen.copies import Copied, Copying, copying
from overlapc.config import Config
from overlapc.errors import NoSharedMemory
from overlapc.estimators.agreement.rank_agreement import GraphAgreement
from overlapc.estimators.device import IDEAL, DeviceProfile
from overlapc.estimators.from_profile import from_profile
from overlapc.fx.arguments import argument
from overlapc.fx.collectives import Collective, find_collectives
from overlapc.fx.communication import group_of, is_asynchronous
from overlapc.fx.exchange import EXCHANGE, Place, exchange_reductions, refusal, travelling_bytes
from overlapc.runtime.copies.command_queues import unsupported
from overlapc.runtime.copies.commands import MOST_RANKS
from overlapc.runtime.copies.layout import Layout, common, from_text, to_text
from overlapc.runtime.copies.pool import GraphCopies, KeptCopies, Pool, Wanted, kept_pools, open_pools
from overlapc.runtime.copies.shared_memory import FOLDER
from overlapc.schedule.collective_kinds import COPY, KINDS
from overlapc.schedule.model import Comm, Kind, Schedule
from overlapc.schedule.model import Node as ScheduleNode

AUTO, LIBRARY_ONLY = "auto", "nccl"  # of `Config.transport`
REDUCTIONS = ("reduce_scatter", "all_reduce")  # that an exchange and a sum can take the place of


Unit = tuple[str, str, str]


@dataclass(frozen=True)
class AgreedCopies:
    """What ranks agreed on about a graph's copies."""

    device: torch.device
    places: Mapping[int, Mapping[str, object]]
    library: frozenset[Unit]
    layouts: Mapping[str, Layout]


@dataclass
class Transports:
    """The choice for one graph: the same on all ranks that compile it, as it depends on what these told each other."""

    device: torch.device | None = None
    agreement: GraphAgreement | None = None
    places: Mapping[int, Mapping[str, object]] = field(default_factory=dict)  # of each rank
    none: str = ""  # reason why no collective of the graph goes by copies; "" if some may, or none was asked to
    wanted: bool = False
    exchanges: Collection[Node] = ()  # made of reductions here
    profile: DeviceProfile = IDEAL
    chooses: bool = False  # transport=auto: what costs less by the group's library stays there
    library: frozenset[Unit] = frozenset()  # what is moved faster by the group's library
    agreed: AgreedCopies | None = None  # once memory is laid out
    groups: dict[str, str] = field(default_factory=dict)  # `Comm.group` -> torch's name
    reasons: dict[str, str] = field(default_factory=dict)  # FX node of a collective that does not -> why

    @classmethod
    def of(
        cls,
        gm: GraphModule,
        config: Config,
        agreement: GraphAgreement | None,
        within: bool,
        profile: DeviceProfile,
        runs: bool = True,
    ) -> Transports:
        """What this graph may use. Ranks meet once more if copies may be used.

        runs: False for a graph that is only planned, for the machines of the profile: no other rank runs.
        """
        if not considers_copies(config, profile):
            return cls()
        if not runs:
            per_host = config.ranks_per_host or profile.ranks_per_host
            places = {rank: {"host": rank // per_host, "device": rank} for rank in range(dist.get_world_size())}
            return cls(places=places, wanted=True, profile=profile, chooses=config.transport == AUTO)
        found = cls._asked(gm, config, agreement, within)
        found.profile, found.chooses = profile, config.transport == AUTO
        return found

    @classmethod
    def _asked(cls, gm: GraphModule, config: Config, agreement: GraphAgreement | None, within: bool) -> Transports:
        """What copies may do for this graph where its ranks are, as these tell each other."""
        devices = {
            value.device
            for node in gm.graph.nodes
            for value in [node.meta.get("val")]
            if isinstance(value, torch.Tensor) and value.device.type != "meta"
        }
        reason = _no_copies(config, agreement, within, devices)
        device = None if reason else next(iter(devices))
        if agreement is None:
            return cls(none=reason, wanted=True)
        mine = {"reason": reason, **({} if device is None else _place(device))}
        if config.ranks_per_host is not None:
            mine["host"] = f"{mine.get('host')}, {dist.get_rank() // config.ranks_per_host}"
        told = [json.loads(text) for text in agreement.tell("what can carry collectives", json.dumps(mine))]
        reason = next((each["reason"] for each in told if each["reason"]), "")
        return cls(device, agreement, dict(zip(agreement.ranks, told, strict=True)), reason, wanted=True)

    @classmethod
    def reopened(
        cls, kept: Sequence[KeptCopies], gm: GraphModule, config: Config, agreement: GraphAgreement, within: bool
    ) -> dict[str, GraphCopies] | None:
        """By group, copies that an earlier process kept; None, on all ranks, where ranks are such that copies cannot
        do it, or have no memory to share."""
        asked = cls._asked(gm, config, agreement, within)
        if asked.none or asked.device is None or any(asked._apart(each.ranks, asked.device) for each in kept):
            return None
        names = {each.comm.group: group_of(each.start) or "" for each in find_collectives(gm.graph)}
        wanted = [
            Wanted(names[each.group], each.group, each.ranks, each.layout.bytes, str(each.layout)) for each in kept
        ]
        try:
            with unset_fake_temporarily():
                opened = open_pools(wanted, asked.device, agreement.ranks, agreement.tell)
        except NoSharedMemory:  # raised on all ranks; who plans anew says so
            return None
        return {each.group: GraphCopies.reopened(each, opened[each.group]) for each in kept}

    @classmethod
    def following(cls, agreed: AgreedCopies) -> Transports:
        """What a graph may use that goes by what ranks agreed on about one with the same collectives."""
        return cls(agreed.device, None, agreed.places, wanted=True, library=agreed.library, agreed=agreed)

    def exchange(self, gm: GraphModule, found: Sequence[Collective]) -> None:
        """Makes an exchange and a sum of each reduction that can be one and that copies can carry."""
        if not self.wanted or self.none:
            return
        if self.chooses and self.agreed is None:
            self.library = by_library([(each.comm, self._by_copies(each)) for each in found], self.profile)
        takes = {
            each.start: Place(each.comm.ranks.index(dist.get_rank()), each.comm.size)
            for each in found
            if each.comm.collective in REDUCTIONS
            and unit_of(each.comm) not in self.library
            and self._refused(each.start, each.comm.ranks) is None
        }
        before = set(gm.graph.nodes)
        exchange_reductions(gm, takes.get)
        self.exchanges = {node for node in gm.graph.nodes if node not in before and is_asynchronous(node)}

    def _by_copies(self, each: Collective) -> Sequence[Comm]:
        """The collectives by copies that would replace `each`; none if it cannot go by copies."""
        comm = each.comm
        if self._refused(each.start, comm.ranks) is not None:
            return []
        if comm.collective == "all_gather" or (comm.collective == "all_to_all" and _even(each)):
            return [replace(comm, via=COPY)]
        if comm.collective not in REDUCTIONS:
            return []
        exchange = replace(comm, collective="all_to_all", via=COPY, bytes=travelling_bytes(each.start))
        gathers = [replace(comm, collective="all_gather", via=COPY)] if comm.collective == "all_reduce" else []
        return [exchange, *gathers]

    def chosen(self, found: Sequence[Collective]) -> list[Collective]:
        """The collectives, each with what carries it."""
        if not self.wanted:
            return list(found)
        return [self._chosen(each) for each in found]

    def _chosen(self, each: Collective) -> Collective:
        reason = self.none or self._why_not(each)
        if reason:
            self.reasons[each.start.name] = reason
            return each
        self.groups[each.comm.group] = group_of(each.start) or ""
        return replace(each, comm=replace(each.comm, via=COPY))

    def _why_not(self, each: Collective) -> str | None:
        kind = KINDS.get(each.comm.collective)
        if unit_of(each.comm) in self.library:
            return "so little is moved faster by the group's library"
        if each.synchronous or kind is None:
            return "not a collective that is started and waited for"
        if each.start not in self.exchanges and kind.name in REDUCTIONS:
            return refusal(each.start) or self._refused(each.start, each.comm.ranks) or "its op takes a list of tensors"
        if not kind.by_copies:
            return f"{kind.name} is not done by copies yet"
        if kind.name == "all_to_all" and not _even(each):
            return "its parts are not of one size that is known"
        if len(each.waits) != 1 or isinstance(argument(each.start, 0), list | tuple):
            return "its op takes a list of tensors, or its wait is in another graph"
        return self._refused(each.start, each.comm.ranks)

    def _refused(self, start: Node, ranks: Sequence[int]) -> str | None:
        """Reason why copies cannot reach all ranks of this collective."""
        value = argument(start, 0).meta.get("val") if isinstance(argument(start, 0), Node) else None
        if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
            return "its size is symbolic"
        if start.target is torch.ops._c10d_functional.all_reduce.default and value.numel() < len(ranks):
            return "it has fewer elements than ranks"
        return self._apart(ranks, value.device)

    def _apart(self, ranks: Sequence[int], device: torch.device) -> str | None:
        """Reason why copies cannot reach all of these ranks."""
        if not 1 < len(ranks) <= MOST_RANKS or any(rank not in self.places for rank in ranks):
            return f"its group has {len(ranks)} ranks"
        places = [self.places[rank] for rank in ranks]
        if len({place["host"] for place in places}) > 1:
            return "its group spans several hosts"
        if len({place["device"] for place in places}) < len(places) and device.type != "cpu":
            return "ranks of its group share a GPU"
        return None

    def opened(self, schedule: Schedule) -> Mapping[str, Copied]:
        """By start, how generated code runs what goes by copies: memory is laid out, agreed, and mapped into all."""
        if not self.wanted or self.none or self.device is None:
            return {}
        graph = copying(schedule)
        if not graph.starts:  # the same on all ranks, as the order of collectives is
            return {}
        if self.agreement is None:
            pools = self._kept(graph)
            assert pools is not None, "`fits` returned True"
            assert self.agreed is not None
            return graph.on(self.agreed.layouts, pools)
        mine = {group: to_text(each.events) for group, each in graph.groups.items()}
        given = self.agreement.tell("slots for copies", json.dumps(mine))
        told = dict(zip(self.agreement.ranks, map(json.loads, given), strict=True))
        layouts = {
            group: common([from_text(told[rank][group]) for rank in graph.ranks(group)]) for group in graph.groups
        }
        with unset_fake_temporarily():  # or what is done to the memory would be traced, and not done
            opened = open_pools(
                graph.wanted(layouts, self.groups), self.device, self.agreement.ranks, self.agreement.tell
            )
        self.agreed = AgreedCopies(self.device, self.places, self.library, layouts)
        return graph.on(layouts, opened)

    def fits(self, schedule: Schedule) -> bool:
        """Whether the schedule can go by what ranks agreed on before, without meeting them."""
        graph = copying(schedule)
        if not graph.starts:
            return self.agreed is None
        return self._kept(graph) is not None

    def _kept(self, graph: Copying) -> Mapping[str, Pool] | None:
        """The pools that ranks agreed on, if the graph can go by their layouts."""
        if self.agreed is None or graph.broken(self.agreed.layouts) is not None:
            return None
        return kept_pools(graph.wanted(self.agreed.layouts, self.groups), self.agreed.device)


def unit_of(comm: Comm) -> Unit:
    """What is moved together: collectives of one kind of a unit of `fully_shard`."""
    return comm.collective, comm.group, comm.unit


def rank_in_graphs(config: Config) -> str:
    """What graphs of ranks differ by (`fx/exchange.py`), for who finds them by their contents."""
    return "" if config.transport == LIBRARY_ONLY or not dist.is_initialized() else f"rank {dist.get_rank()}"


def considers_copies(config: Config, profile: DeviceProfile) -> bool:
    """Whether copies may carry anything: they were asked for, or the profile knows what they take."""
    return config.transport == COPY or (config.transport == AUTO and profile.copy_link is not None)


def _even(each: Collective) -> bool:
    """Whether an all-to-all gives every rank a part of the same size."""
    if each.start.target is EXCHANGE:
        return True
    if each.start.target is not torch.ops._c10d_functional.all_to_all_single.default:
        return False
    result = each.start.meta.get("val")
    splits = (*argument(each.start, 1), *argument(each.start, 2))
    static = isinstance(result, torch.Tensor) and all(isinstance(size, int) for size in (*result.shape, *splits))
    return static and len(set(splits)) == 1


def by_library(collectives: Sequence[tuple[Comm, Sequence[Comm]]], profile: DeviceProfile) -> frozenset[Unit]:
    """Of collectives, each with what copies would carry in its place, the units that cost less by the group's library.

    A unit is moved in one launch, and costs its time, as many times as long as it makes large matmuls beside it.
    Nothing without a profile that knows copies.
    """
    if profile.copy_link is None:
        return frozenset()
    units: dict[Unit, list[tuple[Comm, Sequence[Comm]]]] = {}
    for comm, by_copies in collectives:
        if by_copies:
            units.setdefault(unit_of(comm), []).append((comm, by_copies))
    found = set()
    for unit, members in units.items():
        library_ns = _cost_ns([comm for comm, _ in members], profile)
        copies_ns = [_cost_ns(launch, profile) for launch in zip(*(by_copies for _, by_copies in members), strict=True)]
        if library_ns < sum(copies_ns):
            found.add(unit)
    return frozenset(found)


def _cost_ns(comms: Sequence[Comm], profile: DeviceProfile) -> float:
    """Time of one launch of `comms` and what it costs matmuls beside it; infinite if `profile` has no estimate."""
    comm = replace(comms[0], bytes=sum(each.bytes for each in comms))
    estimate = from_profile(profile).estimate(ScheduleNode("", Kind.START, comm.collective, comm=comm))
    return math.inf if estimate is None else estimate.ns * profile.slowdown(comm.carried).matmul


def _no_copies(
    config: Config, agreement: GraphAgreement | None, within: bool, devices: Collection[torch.device]
) -> str:
    """Reason why nothing of a graph goes by copies, as this rank sees it."""
    if within:
        return "a graph within another"
    if config.wrapper != "python":
        return "wrapper='fx' has no code for copies"
    if config.cuda_graphs:
        return "CUDA graphs cannot hold copies that wait for other ranks"
    if config.check_lifecycle:
        return "check_lifecycle looks at memory that copies share"
    if agreement is None or dist.get_backend() == "fake":
        return "ranks do not meet while compiling (rank_check)"
    if len(devices) != 1:
        return f"the graph is on {len(devices)} devices"
    return unsupported(next(iter(devices))) or ""


def _place(device: torch.device) -> dict[str, object]:
    """What tells a rank's host and device from others'."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else os.uname().nodename
    if device.type == "cpu":
        return {"host": f"{host}/{os.stat(FOLDER).st_dev}", "device": "cpu"}
    return {"host": host, "device": str(torch.cuda.get_device_properties(device).uuid)}


def carried(gm: GraphModule, safe: frozenset[str], transports: Transports) -> list[Collective]:
    """Every launch of a canonical graph with what carries it; reductions that copies carry are rewritten first."""
    transports.exchange(gm, find_collectives(gm.graph, safe))
    return transports.chosen(find_collectives(gm.graph, safe))
