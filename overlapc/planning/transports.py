"""Chooses the transport of each collective of a graph (`transport=`), and records why copies were not used.

Copies are slower than the process group's library for little data, because ranks wait for each other's flags. So the
gathers, or the reductions, of a unit of `fully_shard` use copies where the profile's times of copies are shorter; with
a profile without such times they use the library. A collective of a group that spans several hosts is divided: copies
within each host, the library across hosts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from overlapc.agreement.rank_agreement import GraphAgreement
from overlapc.codegen.copies import Copied, Copying, copying
from overlapc.config import Config
from overlapc.estimators.device import IDEAL, DeviceProfile
from overlapc.estimators.from_profile import from_profile
from overlapc.fx.arguments import argument
from overlapc.fx.comm.collectives import Collective, find_collectives
from overlapc.fx.comm.communication import group_of, is_collective
from overlapc.fx.comm.exchange import (
    EXCHANGE,
    RankInGroup,
    exchange_reductions,
    gather_by_hosts,
    refusal,
    travelling_bytes,
)
from overlapc.planning.copy_reach import CopyReach
from overlapc.planning.host_groups import DividedGroup, divided
from overlapc.runtime.copies.command_queues import unsupported
from overlapc.runtime.copies.layout import Layout, common, from_text, to_text
from overlapc.runtime.copies.pool import Pool, open_pools, reusable_pools
from overlapc.schedule.collective_kinds import COPY, KINDS
from overlapc.schedule.model import Comm, Kind, Schedule
from overlapc.schedule.model import Node as ScheduleNode

AUTO, LIBRARY_ONLY = "auto", "nccl"  # values of `Config.transport`
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
REDUCTIONS = ("reduce_scatter", "all_reduce")  # collectives that an exchange and a sum can replace

Hosts = Sequence[tuple[int, ...]]  # the ranks of each host
Unit = tuple[str, str, str]


@dataclass(frozen=True)
class AgreedCopies:
    """What ranks agreed on about a graph's copies."""

    device: torch.device
    places: Mapping[int, Mapping[str, object]]
    units_by_library: frozenset[Unit]
    layouts: Mapping[str, Layout]
    by_library: frozenset[str]  # groups that use the library, because their collectives did not fit an earlier layout
    over_hosts: bool = False

    def without(self, groups: Collection[str]) -> AgreedCopies:
        """Return the agreement without the layouts of `groups`, for a graph that uses the library over these."""
        layouts = {group: layout for group, layout in self.layouts.items() if group not in groups}
        return replace(self, layouts=layouts, by_library=self.by_library.union(groups))


@dataclass
class Transports:
    """The transports of one graph: the same on all ranks that compile it, as they depend only on data that these ranks
    exchanged."""

    device: torch.device | None = None
    agreement: GraphAgreement | None = None
    cache_dir: Path = Path()  # where code that copies need is built
    reach: CopyReach = field(default_factory=CopyReach)
    wanted: bool = False
    rewritten: bool = False  # collectives of the graph were replaced by others that copies can carry
    over_hosts: bool = False  # groups that span several hosts may be divided
    divided: dict[str, DividedGroup] = field(default_factory=dict)  # torch's name of a divided group -> its parts
    profile: DeviceProfile = IDEAL
    chooses: bool = False  # transport=auto: units that cost less with the group's library use it
    units_by_library: frozenset[Unit] = frozenset()  # units that cost less with the group's library
    agreed: AgreedCopies | None = None  # set once memory is laid out
    by_library: frozenset[str] = frozenset()  # groups whose collectives do not fit an agreed layout
    groups: dict[str, str] = field(default_factory=dict)  # `Comm.group` -> torch's name
    reasons: dict[str, str] = field(default_factory=dict)  # FX node of a collective without copies -> why

    @classmethod
    def of(
        cls,
        gm: GraphModule,
        config: Config,
        agreement: GraphAgreement | None,
        is_inner: bool,
        profile: DeviceProfile,
        will_run: bool = True,
    ) -> Transports:
        """Return the transports that this graph may use; ranks exchange data if copies may be used.

        will_run: False for a graph that is only planned, for the machines of the profile: no other rank runs.
        """
        if not considers_copies(config, profile):
            return cls()
        if not will_run:
            per_host = config.ranks_per_host or profile.ranks_per_host
            places = {rank: {"host": rank // per_host, "device": rank} for rank in range(dist.get_world_size())}
            transports = cls(reach=CopyReach(places), wanted=True)
        else:
            transports = cls._asked(gm, config, agreement, is_inner)
        transports.profile, transports.chooses = profile, config.transport == AUTO
        # Only on request: groups that span several hosts have not been measured on GPUs.
        transports.over_hosts = not transports.chooses or config.ranks_per_host is not None
        return transports

    @classmethod
    def _asked(cls, gm: GraphModule, config: Config, agreement: GraphAgreement | None, is_inner: bool) -> Transports:
        """Return the transports that the hosts and devices of this graph's ranks allow; ranks exchange these."""
        tensors = tree_leaves([node.meta.get("val") for node in gm.graph.nodes if is_collective(node)])
        devices = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}
        reason = _no_copies(config, agreement, is_inner, devices)
        device = None if reason else next(iter(devices))
        if agreement is None:
            return cls(reach=CopyReach(none=reason), wanted=True)
        reach = CopyReach.agreed_on(agreement, config, device, reason)
        return cls(device, agreement, config.cache_dir, reach, wanted=True)

    @classmethod
    def following(cls, agreed: AgreedCopies, resized: frozenset[str]) -> Transports:
        """Return the transports of a graph that follows an earlier one, about whose copies ranks `agreed`.

        resized: the groups whose collectives differ from the earlier graph's; these use the group's library.
        """
        agreed = agreed.without(resized)
        return cls(
            agreed.device,
            reach=CopyReach(agreed.places),
            wanted=True,
            units_by_library=agreed.units_by_library,
            agreed=agreed,
            by_library=agreed.by_library,
            over_hosts=agreed.over_hosts,
        )

    def rewrite(self, gm: GraphModule, found: Sequence[Collective]) -> None:
        """Rewrite collectives so that copies can carry them: a reduction as an exchange and a sum, a collective of a
        group that spans several hosts as one within each host and one across hosts."""
        if not self.wanted or self.reach.none:
            return
        hosts = {collective.start: self._hosts(collective) for collective in found}
        if self.chooses and self.agreed is None:
            replacements = [(collective.comm, _by_copies(collective, hosts[collective.start])) for collective in found]
            self.units_by_library = by_library(replacements, self.profile)
        placed = ((collective.start, self._place(collective, hosts[collective.start])) for collective in found)
        places = {start: place for start, place in placed if place is not None}
        gathers = [start for start, place in places.items() if start.target is GATHER and place.hosts > 1]
        for start in gathers:
            gather_by_hosts(start, places[start])
        self.rewritten = exchange_reductions(gm, places.get) > 0 or bool(gathers)

    def _place(self, collective: Collective, hosts: Hosts | None) -> RankInGroup | None:
        """Return this rank's place in the groups that a collective is rewritten for; None if it is not rewritten."""
        comm = collective.comm
        rewritable = comm.collective in (*REDUCTIONS, "all_gather") and comm.group not in self.by_library
        if hosts is None or unit_of(comm) in self.units_by_library or not rewritable:
            return None
        if len(hosts) == 1:
            return RankInGroup(comm.ranks.index(dist.get_rank()), comm.size)
        group = group_of(collective.start) or ""
        groups = divided(group, comm.group, hosts, alone=self.agreed is not None)
        if groups is None:
            return None
        self.divided[group] = DividedGroup(group, comm.group, tuple(comm.ranks), groups)
        own = groups.ranks_within.index(dist.get_rank())
        return RankInGroup(own, len(groups.ranks_within), len(hosts), groups.within, groups.across)

    def _hosts(self, collective: Collective) -> Hosts | None:
        """Return all ranks as one host if copies reach all of them, the ranks of each host if the collective can be
        divided within and across hosts, else None."""
        start, ranks = collective.start, collective.comm.ranks
        if self._refused(start, ranks) is None:
            return [ranks]
        if not self.over_hosts or len(collective.waits) != 1 or self._shapeless(start, len(ranks)):
            return None
        if not argument(start, 0).meta["val"].dim() or (collective.comm.collective in REDUCTIONS and refusal(start)):
            return None
        hosts = self.reach.hosts(ranks)
        if hosts is None:
            return None
        device = argument(start, 0).meta["val"].device
        return None if any(self.reach.apart(of_one, device.type) for of_one in hosts) else hosts

    def chosen(self, found: Sequence[Collective]) -> list[Collective]:
        """Return the collectives, each with its transport."""
        if not self.wanted:
            return list(found)
        return [self._chosen(collective) for collective in found]

    def _chosen(self, collective: Collective) -> Collective:
        reason = self.reach.none or self._why_not(collective)
        if reason:
            self.reasons[collective.start.name] = reason
            return collective
        self.groups[collective.comm.group] = group_of(collective.start) or ""
        return replace(collective, comm=replace(collective.comm, via=COPY))

    def _why_not(self, collective: Collective) -> str | None:
        start, comm = collective.start, collective.comm
        kind = KINDS.get(comm.collective)
        if unit_of(comm) in self.units_by_library:
            return "the group's library is faster for this size"
        if comm.group in self.by_library:
            return "its size differs from that in the graph compiled first, whose shared-memory layout all ranks keep"
        if collective.synchronous or kind is None:
            return "it is not an asynchronous collective with a start and a wait"
        if kind.name in REDUCTIONS:
            return refusal(start) or self._refused(start, comm.ranks) or "its op takes a list of tensors"
        if not kind.by_copies:
            return f"{kind.name} is not implemented by copies yet"
        if kind.name == "all_to_all" and not _even(collective):
            return "its parts differ in size or have symbolic sizes"
        if len(collective.waits) != 1 or isinstance(argument(start, 0), list | tuple):
            return "its op takes a list of tensors, or its wait is in another graph"
        return self._refused(start, comm.ranks)

    def _refused(self, start: Node, ranks: Sequence[int]) -> str | None:
        """Return the reason why copies cannot carry this collective between its ranks, or None if they can."""
        return self._shapeless(start, len(ranks)) or self.reach.apart(ranks, argument(start, 0).meta["val"].device.type)

    def _shapeless(self, start: Node, ranks: int) -> str | None:
        """Return the reason why the data of a collective cannot be divided among ranks, or None if it can."""
        value = argument(start, 0).meta.get("val") if isinstance(argument(start, 0), Node) else None
        if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
            return "its size is symbolic"
        if start.target is torch.ops._c10d_functional.all_reduce.default and value.numel() < ranks:
            return "it has fewer elements than ranks"
        return None

    def opened(self, schedule: Schedule) -> Mapping[str, Copied]:
        """Lay out memory for copies, agree on it, and map it into all ranks. Return for each start that uses copies how
        generated code runs it."""
        if not self.wanted or self.reach.none or self.device is None:
            return {}
        graph = copying(schedule)
        if not graph.starts:  # the same on all ranks, as the order of collectives is
            return {}
        if self.agreement is None:
            pools = self._open_pools(graph)
            assert pools is not None, "`fits` returned True"
            assert self.agreed is not None
            return graph.on(self.agreed.layouts, pools)
        mine = {group: to_text(each.events) for group, each in graph.groups.items()}
        texts = self.agreement.exchange("slots for copies", json.dumps(mine))
        events = dict(zip(self.agreement.ranks, map(json.loads, texts), strict=True))
        layouts = {
            group: common([from_text(events[rank][group]) for rank in graph.ranks(group)]) for group in graph.groups
        }
        with unset_fake_temporarily():  # in fake mode, operations on the memory would be traced instead of executed
            opened = open_pools(
                graph.wanted(layouts, self.groups),
                self.device,
                self.agreement.ranks,
                self.agreement.exchange,
                self.cache_dir,
            )
        self.agreed = AgreedCopies(
            self.device, self.reach.places, self.units_by_library, layouts, self.by_library, self.over_hosts
        )
        return graph.on(layouts, opened)

    def fits(self, schedule: Schedule) -> bool:
        """Whether the schedule can use the copy layouts that ranks agreed on before."""
        graph = copying(schedule)
        if not graph.starts:
            return self.agreed is None or not self.agreed.layouts
        return self._open_pools(graph) is not None

    def _open_pools(self, graph: Copying) -> Mapping[str, Pool] | None:
        """Return the open pools that ranks agreed on; None if the graph does not fit their layouts."""
        if self.agreed is None or graph.broken(self.agreed.layouts) is not None:
            return None
        return reusable_pools(graph.wanted(self.agreed.layouts, self.groups), self.agreed.device)


def unit_of(comm: Comm) -> Unit:
    """Return the key of the collectives that are moved together: those of one kind of a unit of `fully_shard`."""
    return comm.collective, comm.group, comm.unit


def rank_in_graphs(config: Config) -> str:
    """Return what distinguishes ranks in a cache key: with copies, their graphs differ (fx/comm/exchange.py)."""
    return "" if config.transport == LIBRARY_ONLY or not dist.is_initialized() else f"rank {dist.get_rank()}"


def considers_copies(config: Config, profile: DeviceProfile) -> bool:
    """Whether copies may carry collectives: the option asks for them, or the profile has their times."""
    return config.transport == COPY or (config.transport == AUTO and profile.copy_link is not None)


def _by_copies(collective: Collective, hosts: Hosts | None) -> Sequence[Comm]:
    """Return the collectives that would replace `collective` if copies carry as much as possible; empty if they can
    carry nothing of it."""
    if hosts is None:
        return []
    comm = collective.comm
    within, across = comm, comm
    if len(hosts) > 1:
        mine, own = next((ranks, ranks.index(dist.get_rank())) for ranks in hosts if dist.get_rank() in ranks)
        group = comm.group
        within = replace(comm, group=f"{group}_within", ranks=mine, size=len(mine))
        ranks_across = tuple(ranks[own] for ranks in hosts)
        share = comm.bytes // len(mine)
        across = replace(comm, group=f"{group}_across", ranks=ranks_across, size=len(hosts), bytes=share)
    beside = [across] if len(hosts) > 1 else []
    gather = replace(within, collective="all_gather", via=COPY)
    if comm.collective == "all_gather":
        return [*beside, gather]
    if comm.collective == "all_to_all" and len(hosts) == 1 and _even(collective):
        return [replace(comm, via=COPY)]
    if comm.collective not in REDUCTIONS:
        return []
    exchange = replace(within, collective="all_to_all", via=COPY, bytes=travelling_bytes(collective.start))
    return [exchange, *beside, *([gather] if comm.collective == "all_reduce" else [])]


def _even(collective: Collective) -> bool:
    """Whether an all-to-all gives every rank a part of the same size."""
    start = collective.start
    if start.target is EXCHANGE:
        return True
    if start.target is not torch.ops._c10d_functional.all_to_all_single.default:
        return False
    result = start.meta.get("val")
    splits = (*argument(start, 1), *argument(start, 2))
    static = isinstance(result, torch.Tensor) and all(isinstance(size, int) for size in (*result.shape, *splits))
    return static and len(set(splits)) == 1


def by_library(collectives: Sequence[tuple[Comm, Sequence[Comm]]], profile: DeviceProfile) -> frozenset[Unit]:
    """Return the units that cost less with the process group's library than with copies.

    collectives: each with the collectives that would replace it with copies. A unit is moved in one launch, and costs
    the launch's time multiplied by the slowdown of large matmuls that run beside it. Empty for a profile without times
    of copies.
    """
    if profile.copy_link is None:
        return frozenset()
    units: dict[Unit, list[tuple[Comm, Sequence[Comm]]]] = {}
    for comm, by_copies in collectives:
        if by_copies:
            units.setdefault(unit_of(comm), []).append((comm, by_copies))
    cheaper = set()
    for unit, members in units.items():
        library_ns = _cost_ns([comm for comm, _ in members], profile)
        by_queue: dict[str, float] = {}  # launches on different queues overlap with those of other units
        for launch in zip(*(by_copies for _, by_copies in members), strict=True):
            queue = launch[0].queue
            by_queue[queue] = by_queue.get(queue, 0.0) + _cost_ns(launch, profile)
        if library_ns < max(by_queue.values()):
            cheaper.add(unit)
    return frozenset(cheaper)


def _cost_ns(comms: Sequence[Comm], profile: DeviceProfile) -> float:
    """Return the time of one launch of `comms` times the slowdown of matmuls beside it; infinite if it is unknown."""
    comm = replace(comms[0], bytes=sum(each.bytes for each in comms))
    estimate = from_profile(profile).estimate(ScheduleNode("", Kind.START, comm.collective, comm=comm))
    return math.inf if estimate is None else estimate.ns * profile.slowdown(comm.carried).matmul


def _no_copies(
    config: Config, agreement: GraphAgreement | None, is_inner: bool, devices: Collection[torch.device]
) -> str:
    """Return the reason why this rank cannot use copies for any collective of a graph; "" if it can."""
    if is_inner:
        return "the graph is an inner graph of another"
    if config.wrapper != "python":
        return "wrapper='fx' does not support copies"
    if config.cuda_graphs:
        return "CUDA graphs cannot hold copies that wait for other ranks"
    if config.check_lifecycle:
        return "check_lifecycle does not support the memory that copies share"
    if dist.is_initialized() and dist.get_backend() == "fake":
        return "torch's fake process group moves no data"
    if agreement is None:
        return "ranks exchange no data while compiling (see rank_check)"
    if len(devices) != 1:
        return f"tensors of the graph's collectives are on {len(devices)} devices"
    return unsupported(next(iter(devices)), config.cache_dir) or ""


def carried(gm: GraphModule, safe: frozenset[str], transports: Transports) -> list[Collective]:
    """Return every collective of a canonical graph with its transport; those that copies carry are rewritten first."""
    transports.rewrite(gm, find_collectives(gm.graph, safe))
    return transports.chosen(find_collectives(gm.graph, safe))
