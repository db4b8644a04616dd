"""Which collectives of a graph peer-to-peer copies may carry; all ranks that compile the graph have the same rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from overlapc.agreement.rank_agreement import GraphAgreement
from overlapc.config import Config
from overlapc.estimators.device import DeviceProfile
from overlapc.fx.arguments import argument
from overlapc.fx.comm.collectives import Collective
from overlapc.fx.comm.communication import is_collective
from overlapc.fx.comm.exchange import refusal
from overlapc.planning.copy_reach import CopyReach
from overlapc.planning.transport_costs import REDUCTIONS, Hosts, Unit, has_equal_parts
from overlapc.runtime.copies.command_queues import unsupported
from overlapc.runtime.copies.layout import Layout
from overlapc.schedule.collective_kinds import COPY, KINDS

AUTO, LIBRARY_ONLY = "auto", "nccl"  # values of `Config.transport`


@dataclass(frozen=True)
class AgreedCopies:
    """What ranks agreed on about a graph's copies."""

    device: torch.device
    places: Mapping[int, Mapping[str, object]]  # see `CopyReach`
    layouts: Mapping[str, Layout]  # of the shared memory, by group
    library_units: frozenset[Unit]  # units that cost less with the library
    library_groups: frozenset[str]  # groups that use the library, because their collectives fit no earlier layout
    over_hosts: bool = False

    def without(self, groups: Collection[str]) -> AgreedCopies:
        """Return the agreement without the layouts of `groups`, for a graph that uses the library over these."""
        layouts = {group: layout for group, layout in self.layouts.items() if group not in groups}
        return replace(self, layouts=layouts, library_groups=self.library_groups.union(groups))


@dataclass(frozen=True)
class CopyRules:
    """The rules for one graph, known before its collectives are looked at."""

    reach: CopyReach
    device: torch.device | None = None  # of the shared memory; None for a graph that is only planned
    agreement: GraphAgreement | None = None  # with the ranks that lay out memory together
    cache_dir: Path = Path()  # where code that copies need is built
    over_hosts: bool = False  # groups that span several hosts may be divided
    profile: DeviceProfile | None = None  # with transport=auto: units that cost less with the library use it
    followed: AgreedCopies | None = None  # the copies of the earlier graph that this graph follows
    unequal: frozenset[str] = frozenset()  # starts of collectives whose data have other sizes on some ranks

    @classmethod
    def of(
        cls,
        gm: GraphModule,
        config: Config,
        agreement: GraphAgreement | None,
        is_inner: bool,
        profile: DeviceProfile,
        will_run: bool = True,
    ) -> CopyRules | None:
        """Return the rules for `gm`, for which ranks exchange data; None if copies carry none of its collectives.

        will_run: False for a graph that is only planned, for the machines of the profile: no other rank runs.
        """
        if not considers_copies(config, profile):
            return None
        chooses = config.transport == AUTO
        # Only on request: groups that span several hosts have not been measured on GPUs.
        over_hosts = not chooses or config.ranks_per_host is not None
        if not will_run:
            per_host = config.ranks_per_host or profile.ranks_per_host
            places = {rank: {"host": rank // per_host, "device": rank} for rank in range(dist.get_world_size())}
            rules = cls(CopyReach(places))
        else:
            rules = cls._asked(gm, config, agreement, is_inner)
        return replace(rules, over_hosts=over_hosts, profile=profile if chooses else None)

    @classmethod
    def _asked(cls, gm: GraphModule, config: Config, agreement: GraphAgreement | None, is_inner: bool) -> CopyRules:
        """Return what the hosts and devices of this graph's ranks allow; ranks exchange these."""
        tensors = tree_leaves([node.meta.get("val") for node in gm.graph.nodes if is_collective(node)])
        devices = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}
        reason = _no_copies(config, agreement, is_inner, devices)
        device = None if reason else next(iter(devices))
        if agreement is None:
            return cls(CopyReach(none=reason))
        reach = CopyReach.agreed_on(agreement, config, device, reason)
        unequal = frozenset() if reach.none else _unequal(gm, agreement)
        return cls(reach, device, agreement, config.cache_dir, unequal=unequal)

    @classmethod
    def following(cls, agreed: AgreedCopies, resized: Collection[str]) -> CopyRules:
        """Return the rules for a graph that follows an earlier one, about whose copies ranks `agreed`.

        resized: the groups whose collectives differ from the earlier graph's; these use the group's library.
        """
        agreed = agreed.without(resized)
        return cls(CopyReach(agreed.places), agreed.device, over_hosts=agreed.over_hosts, followed=agreed)

    @property
    def library_groups(self) -> frozenset[str]:
        """The groups whose collectives do not fit the layouts of the earlier graph."""
        return frozenset() if self.followed is None else self.followed.library_groups

    def hosts(self, collective: Collective) -> Hosts | None:
        """Return all ranks as one host if copies reach all of them, the ranks of each host if the collective can be
        divided within and across hosts, else None."""
        start, ranks = collective.start, collective.comm.ranks
        if self._refused(start, ranks) is None:
            return [ranks]
        if not self.over_hosts or len(collective.waits) != 1:
            return None
        if start.name in self.unequal or _indivisible(start, len(ranks)):
            return None
        data = argument(start, 0).meta["val"]
        if not data.dim() or (collective.comm.collective in REDUCTIONS and refusal(start)):
            return None
        hosts = self.reach.hosts(ranks)
        if hosts is None or any(self.reach.apart(of_one, data.device.type) for of_one in hosts):
            return None
        return hosts

    def why_not(self, collective: Collective) -> str | None:
        """Return the reason why copies cannot carry this collective, or None if they can."""
        start, comm = collective.start, collective.comm
        if comm.group in self.library_groups:
            return "its size differs from that in the graph compiled first, whose shared-memory layout all ranks keep"
        reason = form_refused(collective) or self._refused(start, comm.ranks)
        return reason or ("its op takes a list of tensors" if comm.collective in REDUCTIONS else None)

    def _refused(self, start: Node, ranks: Sequence[int]) -> str | None:
        """Return the reason why copies cannot carry the data of `start` between `ranks`, or None if they can."""
        if start.name in self.unequal:
            return "its size differs between ranks that compile the graph"
        return _indivisible(start, len(ranks)) or self.reach.apart(ranks, argument(start, 0).meta["val"].device.type)


def _unequal(gm: GraphModule, agreement: GraphAgreement) -> frozenset[str]:
    """Return the starts of collectives whose data do not have as many elements on all ranks: how copies divide the data
    depends on it. Each group of a mesh axis may have a batch of another size."""
    numels: dict[str, int] = {}
    for node in gm.graph.nodes:
        if is_collective(node):
            tensors = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
            known = all(isinstance(size, int) for tensor in tensors for size in tensor.shape)
            numels[node.name] = sum(tensor.numel() for tensor in tensors) if known else 0
    largest = agreement.agree_on_largest(numels | {f"-{name}": -numel for name, numel in numels.items()})
    return frozenset(name for name in numels if largest[name] != -largest[f"-{name}"])


def form_refused(collective: Collective) -> str | None:
    """Return the reason why copies carry no collective of this form, wherever its ranks are; None if they can."""
    start, comm = collective.start, collective.comm
    kind = KINDS.get(comm.collective)
    if collective.synchronous or kind is None:
        return "it is not an asynchronous collective with a start and a wait"
    if kind.name in REDUCTIONS:
        return refusal(start) or _indivisible(start, len(comm.ranks))
    if not kind.by_copies:
        return f"{kind.name} is not implemented by copies yet"
    if kind.name == "all_to_all" and not has_equal_parts(collective):
        return "its parts differ in size or have symbolic sizes"
    if len(collective.waits) != 1 or isinstance(argument(start, 0), list | tuple):
        return "its op takes a list of tensors, or its wait is in another graph"
    return _indivisible(start, len(comm.ranks))


def _indivisible(start: Node, ranks: int) -> str | None:
    """Return the reason why the data of a collective cannot be divided among ranks, or None if it can."""
    value = argument(start, 0).meta.get("val") if isinstance(argument(start, 0), Node) else None
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return "its size is symbolic"
    if start.target is torch.ops._c10d_functional.all_reduce.default and value.numel() < ranks:
        return "it has fewer elements than ranks"
    return None


def considers_copies(config: Config, profile: DeviceProfile) -> bool:
    """Whether copies may carry collectives: the option asks for them, or the profile has their times."""
    return config.transport == COPY or (config.transport == AUTO and profile.copy_link is not None)


def rank_in_graphs(config: Config) -> str:
    """Return what distinguishes ranks in a cache key: with copies, their graphs differ (fx/comm/exchange.py)."""
    return "" if config.transport == LIBRARY_ONLY or not dist.is_initialized() else f"rank {dist.get_rank()}"


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
