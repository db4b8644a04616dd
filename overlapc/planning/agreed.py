"""What ranks agreed on about their graphs, found by the function that Dynamo compiles or loaded from the disk cache."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._guards import CompileContext
from torch.fx import Node

from overlapc.agreement.rank_agreement import GraphAgreement, Peers, peers_of, peers_spanned_by
from overlapc.codegen.compiled_graph import CompiledGraph, order_hash
from overlapc.config import Config
from overlapc.fx.comm.labels import numbered
from overlapc.fx.comm.pack import CopyCosts
from overlapc.fx.versions.dynamo import frame_numbering, trace_with_symbolic_sizes
from overlapc.fx.versions.tensors import agree_on_hint
from overlapc.graph_names import kind_of
from overlapc.planning.cached_copies import CopiesByPool, reopened, still_open
from overlapc.planning.copy_rules import AgreedCopies
from overlapc.runtime.cache import content_key
from overlapc.runtime.counters import count
from overlapc.schedule.collective_kinds import equal_sizes
from overlapc.schedule.model import Comm

KEPT_GATHERS = "kept gathered"  # name of the choice of `KeptGathers`, and its key in `GraphModule.meta`

Key = tuple[object, ...]
Captured = tuple[tuple[str, Comm], ...]  # (name, collective) of a graph, in program order
Launch = tuple[str, tuple[str, ...]]  # name, and the captured collectives that it launches together
Place = tuple[str, str, str, int]  # of a collective in every graph of a function; see `places_of`


@dataclass(frozen=True)
class KeptGathers:
    """Which gathers a forward saves for its backward, as ranks agreed."""

    captured: Captured  # the collectives of the forward before the choice
    gathers: tuple[str, ...]
    why: str  # reason why no more parameters stay gathered
    beside_pools_bytes: int  # peak bytes of backward outside of the shared memory for copies


@dataclass(frozen=True)
class Agreed:
    """What ranks agreed on about one graph."""

    collectives: tuple[tuple[str, Comm], ...]  # in the schedule before the passes
    launches: tuple[Launch, ...]  # in the final order
    lines: tuple[str, ...]  # the launches as the text that ranks compare
    copies: AgreedCopies | None = None  # None: all collectives use the process groups' libraries
    graph: str = ""  # hash of the graph's text that all ranks compare
    sizes: dict[tuple[int, ...], str] = field(default_factory=dict)  # hashes of the text that ranks of a group compare
    captured: Captured = ()  # the collectives before transports are chosen; `to_follow` compares them
    packing: CopyCosts = CopyCosts(0.0, 0.0, 0.0)  # by which collectives were packed, from the profile of all ranks
    kept: KeptGathers | None = None  # in a forward whose backward would gather parameters again
    keeps_unread: bool = False  # its collectives whose results are not read were not removed

    @property
    def order(self) -> str:
        """The hash of launches and copy layouts, which a cached graph stores as its `order`."""
        return order_hash(self.lines, {} if self.copies is None else self.copies.layouts)


class _HasCaptured(Protocol):
    @property
    def captured(self) -> Captured: ...


Known = TypeVar("Known", bound=_HasCaptured)


@dataclass(frozen=True)
class Followed(Generic[Known]):
    """The agreement about an earlier graph of a function that a new graph of it, for other sizes, must follow."""

    agreed: Known
    resized: frozenset[str] = frozenset()  # process groups whose collectives differ from those of the earlier graph
    compiling_ranks: tuple[int, ...] = ()  # the ranks of these groups; () if this rank compiles alone


def key_of(name: str, options: object) -> Key | None:
    """Return a key that all graphs of one function share, however often Dynamo compiles it; None outside Dynamo."""
    compile_id = CompileContext.current_compile_id()
    if compile_id is None or compile_id.frame_id is None:
        return None
    return compile_id.frame_id, kind_of(name), repr(options)


def to_follow(known: Sequence[Known], captured: Captured, peers: Peers) -> Followed[Known] | None:
    """Return the earlier graph of a function that a graph with the `captured` collectives must follow, or None if all
    ranks compile this graph together and agree on it anew.

    Other ranks may run the earlier graph in the same step. They need not compile if each group that they share with
    this rank has the same collectives in both graphs: only the ranks of groups whose collectives differ have to compile
    this graph, too. If those are all ranks, no rank can run the earlier graph at the same time as this one.
    """
    if not compiles_again():
        return None
    found = None
    for earlier in known:
        here, there = by_group(captured), by_group(earlier.captured)
        resized = frozenset(group for group in here.keys() | there.keys() if here.get(group) != there.get(group))
        if not resized:
            return Followed(earlier)
        groups = {comm.ranks for graph in (here, there) for group in resized for comm in graph.get(group, {}).values()}
        ranks = peers.meetings.ranks if () in groups else peers.spanned(groups)
        if found is None and set(ranks) < set(peers.meetings.ranks):
            found = Followed(earlier, resized, ranks)
    return found


def by_group(collectives: Captured) -> dict[str, dict[Place, Comm]]:
    """Return the collectives of each process group, without the sizes in which ranks may differ: other ranks need not
    compile for these."""
    places = places_of(collectives)
    found: dict[str, dict[Place, Comm]] = {}
    for name, comm in collectives:
        same = equal_sizes(comm.collective, comm.via)
        found.setdefault(comm.group, {})[places[name]] = comm if same else replace(comm, bytes=0)
    return found


def places_of(collectives: Captured, named: bool = True) -> dict[str, Place]:
    """Map the name of each collective to its group and its number among the collectives of this group that serve no
    sharded parameter. Those of a parameter are numbered by parameter and kind: graphs for other sizes may gather and
    reduce parameters in another order, but run all other collectives in the order of the program.

    named: parameters have their names, and positions only among those of one name. Else they have their positions
    among all parameters, because the names differ between groups (experts).
    """
    served = [comm for _, comm in collectives if comm.param]
    position = numbered(comm.param_number for comm in served)
    of_name: defaultdict[str, set[int]] = defaultdict(set)
    for comm in served:
        of_name[comm.param].add(comm.param_number)
    among_namesakes = {name: numbered(numbers) for name, numbers in of_name.items()}

    def parameter(comm: Comm) -> str:
        if not named:
            return f"parameter {position[comm.param_number]}"
        same = among_namesakes[comm.param]
        return comm.param if len(same) == 1 else f"{comm.param} ({same[comm.param_number]})"

    numbers: Counter[tuple[str, str, str]] = Counter()
    found = {}
    for name, comm in collectives:
        kind = (comm.group, parameter(comm), comm.collective) if comm.param else (comm.group, "", "")
        found[name] = *kind, numbers[kind]
        numbers[kind] += 1
    return found


def compiles_again() -> bool:
    """Whether Dynamo has compiled this frame before; `torch._dynamo.reset()` restarts its numbering."""
    compile_id = CompileContext.current_compile_id()
    return compile_id is not None and bool(compile_id.frame_compile_id)


def groups_of_step(inputs: Iterable[Any], config: Config) -> list[tuple[int, ...]]:
    """Return the ranks of each mesh of the step's DTensors, which compile the step too if it communicates."""
    if not (config.rank_check and dist.is_available() and dist.is_initialized()):
        return []
    meshes = dict.fromkeys(value._spec.mesh for value in inputs if type(value).__name__ == "DTensor")
    return [tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes if mesh.get_coordinate() is not None]


def compiles_with_others(config: Config) -> bool:
    """Whether ranks exchange data while they compile."""
    return config.rank_check and len(peers_of().meetings.ranks) > 1


def peers_of_collectives(comms: Iterable[Comm], config: Config) -> Peers:
    """Return the ranks that compile a graph with these collectives; this rank alone if no group is known."""
    return _peers_of_groups([comm.ranks for comm in comms if comm.ranks] or [(dist.get_rank(),)], config)


def _peers_of_groups(groups: Sequence[tuple[int, ...]], config: Config) -> Peers:
    peers = peers_spanned_by(groups, config.rank_timeout)
    _forget_before_reset(peers)
    return peers


def _forget_before_reset(peers: Peers) -> None:
    """Drop all earlier agreements if `torch._dynamo.reset()` was called: the memory for their copies may be freed on
    one rank and not yet on another."""
    numbering = frame_numbering()
    if peers.frame_numbering != numbering:
        peers.agreed.clear()
        peers.compared.clear()
    peers.frame_numbering = numbering


def common_step(
    groups: Sequence[tuple[int, ...]],
    kind: str,
    gathered: Hashable,
    cached: Sequence[CompiledGraph],
    config: Config,
    notes: dict[str, str],
    batches: Sequence[tuple[torch.Tensor, Node]],
) -> list[CopiesByPool] | None:
    """Return the copies of each graph of a cached step if every rank has cached a step of the same graphs with the same
    orders of collectives; else None.

    groups: see `groups_of_step`; kind: of the step's first graph; gathered: equal for steps that a rank may compile
    alone; cached: this rank's cached step; batches: its inputs, and where they are in Dynamo's graph.

    If ranks have inputs of different sizes, Dynamo traces the step again with these sizes symbolic, and all ranks plan
    for the median of each: graphs for other sizes could be divided and fused in other ways. A recompile of a step that
    gathers the same parameters may happen on one rank alone: then ranks exchange nothing, and this rank's cached step
    must have the orders that ranks agreed on before.
    """
    peers, step = _peers_of_groups(groups, config), (key_of(kind, config), gathered)
    if compiles_again() and step in peers.compared:
        return still_open(cached) if cached and all(_is_agreed(graph, config) for graph in cached) else None
    graphs = ("" if graph.agreed is None else graph.agreed.graph for graph in cached)
    have = content_key(*graphs, *(graph.order for graph in cached)) if cached else ""
    sizes: dict[tuple[int, ...], str] = {}
    for graph in cached:
        for ranks, digest in ({} if graph.agreed is None else graph.agreed.sizes).items():
            sizes[ranks] = content_key(sizes.get(ranks, ""), digest)
    agreement = GraphAgreement(peers.meetings, "cached step", config.rank_timeout, notes)
    traced = [node.meta["example_value"].shape for _, node in batches]
    shapes = [
        [-size if isinstance(symbol, torch.SymInt) else size for size, symbol in zip(given.shape, symbols, strict=True)]
        for (given, _), symbols in zip(batches, traced, strict=True)
    ]
    with agreement:
        same, unequal, any_fixed = agreement.compare_cached(have, sizes, shapes)
    if any_fixed:
        count("steps_with_different_sizes")
        trace_with_symbolic_sizes([(batches[at][1], dim) for at, dim, _ in unequal])
    peers.compared.add(step)
    for at, dim, median in unequal:
        symbol = traced[at][dim]
        if isinstance(symbol, torch.SymInt):
            agree_on_hint(symbol, median)
    if not same:
        return None
    with agreement:
        copies = reopened(cached, config, agreement)
    if copies is not None:
        for graph in cached:
            if graph.agreed is not None:
                _note(graph.agreed, graph.name, config)
                if graph.agreed.kept is not None:
                    _note(graph.agreed.kept, KEPT_GATHERS, config)
    return copies


def _note(agreed: _HasCaptured, name: str, config: Config) -> None:
    """Note what ranks agreed on about a graph, or the choice called `name`, for later graphs of the function."""
    key = key_of(name, config)
    if key is not None:
        _peers_of(agreed, config).agreed[key].append(agreed)


def _peers_of(agreed: _HasCaptured, config: Config) -> Peers:
    return peers_of_collectives((comm for _, comm in agreed.captured), config)


def _is_agreed(graph: CompiledGraph, config: Config) -> bool:
    """Whether this cached graph has the order that ranks agreed on for the same collectives."""
    if graph.agreed is None:
        return True
    key, peers = key_of(graph.name, config), _peers_of(graph.agreed, config)
    followed = to_follow(peers.agreed.get(key, ()), graph.agreed.captured, peers)
    return followed is not None and not followed.compiling_ranks and followed.agreed.order == graph.order
