"""What ranks agreed on about their graphs, and where they know it from: by what Dynamo compiles, or from disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch.distributed as dist
from torch._guards import CompileContext
from torch.distributed.device_mesh import DeviceMesh

from overlapc.codegen.compiled_graph import CompiledGraph, order_hash
from overlapc.config import Config
from overlapc.estimators.agreement.rank_agreement import GraphAgreement, Peers, peers_of, spanned_ranks
from overlapc.planning.cached_copies import OfGraph, reopened, still_open
from overlapc.runtime.cache import content_key
from overlapc.schedule.model import Comm

if TYPE_CHECKING:
    from overlapc.planning.transports import AgreedCopies

Key = tuple[object, ...]
Captured = tuple[tuple[str, Comm], ...]  # the collectives of a graph by name, in its order
Launch = tuple[str, tuple[str, ...]]  # its name, and the collectives that it stands for


@dataclass(frozen=True)
class Agreed:
    """What ranks agreed on about one graph."""

    collectives: tuple[tuple[str, Comm], ...]  # as passes were given them
    launches: tuple[Launch, ...]  # in the final order
    lines: tuple[str, ...]  # the same as ranks compare it
    copies: AgreedCopies | None = None  # None: the groups' libraries carry all of them
    graph: str = ""  # hash of the graph as ranks compare it
    captured: Captured = ()  # collectives before a transport is chosen, by which `to_follow` finds it

    @property
    def order(self) -> str:
        """The hash by which a kept graph knows its order."""
        return order_hash(self.lines, {} if self.copies is None else self.copies.layouts)


class _HasCaptured(Protocol):
    @property
    def captured(self) -> Captured: ...


Known = TypeVar("Known", bound=_HasCaptured)


@dataclass(frozen=True)
class Followed(Generic[Known]):
    """What was agreed on about an earlier graph of a function, by which one for other sizes goes."""

    agreed: Known
    resized: frozenset[str] = frozenset()  # process groups whose collectives are others than in that graph
    meets: tuple[int, ...] = ()  # the ranks of these groups, which compile this graph together; () where one is alone


def key_of(name: str, options: object) -> Key | None:
    """What graphs of one function have in common, however often Dynamo compiles it; None outside of Dynamo."""
    compile_id = CompileContext.current_compile_id()
    if compile_id is None or compile_id.frame_id is None:
        return None
    return compile_id.frame_id, name.split("_")[0], repr(options)


def to_follow(known: Sequence[Known], captured: Captured, peers: Peers) -> Followed[Known] | None:
    """By which earlier graph of a function one with the `captured` collectives goes; None if all ranks meet about it.

    Other ranks may run the earlier graph in the same step. They notice nothing if each group that this rank shares
    with them has the same collectives: only ranks of groups whose collectives differ have to compile this graph, too.
    Where these are all ranks, none can run the earlier graph beside this one.
    """
    if not compiles_again():
        return None
    found = None
    for earlier in known:
        here, there = by_group(captured), by_group(earlier.captured)
        resized = frozenset(group for group in here.keys() | there.keys() if here.get(group) != there.get(group))
        if not resized:
            return Followed(earlier)
        groups = {comm.ranks for group in resized for comm in (*here.get(group, ()), *there.get(group, ()))}
        meets = peers.meetings.ranks if () in groups else spanned_ranks(dist.get_rank(), groups, dist.get_world_size())
        if found is None and set(meets) < set(peers.meetings.ranks):
            found = Followed(earlier, resized, meets)
    return found


def by_group(collectives: Captured) -> dict[str, list[Comm]]:
    """The collectives of each process group, in order."""
    found: dict[str, list[Comm]] = {}
    for _, comm in collectives:
        found.setdefault(comm.group, []).append(comm)
    return found


def compiles_again() -> bool:
    """Whether Dynamo has compiled this frame before: after `torch._dynamo.reset()` its numbers begin anew."""
    compile_id = CompileContext.current_compile_id()
    return compile_id is not None and bool(compile_id.frame_compile_id)


def forget_before_reset(peers: Peers) -> None:
    """After `torch._dynamo.reset()`, nothing of what was agreed on before is followed: its memory for copies may be
    gone on one rank and not yet on another. To be called for every graph."""
    compile_id = CompileContext.current_compile_id()
    if compile_id is None or compile_id.frame_id is None or compile_id.frame_compile_id:
        return
    if compile_id.frame_id < peers.newest_frame:  # a new function; their numbers only grow
        peers.agreed.clear()
    peers.newest_frame = compile_id.frame_id


def ranks_of_step(inputs: Iterable[Any], config: Config) -> Peers | None:
    """The ranks that compile a step of these inputs too, by the meshes of its DTensors; None without such."""
    if not (config.rank_check and dist.is_available() and dist.is_initialized()):
        return None
    meshes = {value._spec.mesh for value in inputs if type(value).__name__ == "DTensor"}
    groups = {ranks for mesh in meshes for ranks in _ranks_along_axes(mesh)}
    return peers_of(spanned_ranks(dist.get_rank(), groups, dist.get_world_size())) if groups else None


def _ranks_along_axes(mesh: DeviceMesh) -> Iterator[tuple[int, ...]]:
    """Of each axis, the ranks that this rank communicates with: from the mesh itself, as its process groups may be gone
    (`destroy_process_group`) while tensors on it live on."""
    here = mesh.get_coordinate()
    if here is None:
        return
    for axis in range(mesh.ndim):
        index = [slice(None) if other == axis else at for other, at in enumerate(here)]
        yield tuple(mesh.mesh[tuple(index)].tolist())


def common_step(
    peers: Peers, kept: Sequence[CompiledGraph], config: Config, notes: dict[str, str]
) -> list[OfGraph] | None:
    """The copies of each graph of a step, if every rank's disk cache has one of the same graphs with the same order of
    collectives; else None.

    `kept` is this rank's cached step.

    They then follow these orders. A function that is compiled again may be so on one rank alone: then ranks do not
    meet, and what this rank has must be what they agreed on before.
    """
    forget_before_reset(peers)
    if compiles_again():
        return still_open(kept) if kept and all(_is_agreed(each, peers, config) for each in kept) else None
    graphs = ("" if each.agreed is None else each.agreed.graph for each in kept)
    have = content_key(*graphs, *(each.order for each in kept)) if kept else ""
    with GraphAgreement(peers.meetings, "cached step", config.rank_timeout, notes) as agreement:
        if not agreement.agree_on_graph((), have):
            return None
        copies = reopened(kept, config, agreement)
    if copies is not None:
        for each in kept:
            key = key_of(each.name, config)
            if each.agreed is not None and key is not None:
                peers.agreed[key].append(each.agreed)
    return copies


def _is_agreed(graph: CompiledGraph, peers: Peers, config: Config) -> bool:
    """Whether this cached graph has the order that ranks agreed on for the same collectives."""
    if graph.agreed is None:
        return True
    key = key_of(graph.name, config)
    followed = to_follow(peers.agreed.get(key, ()), graph.agreed.captured, peers)
    return followed is not None and not followed.meets and followed.agreed.order == graph.order
