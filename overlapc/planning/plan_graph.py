"""From an FX graph to its final schedule, agreed between ranks: the stages before any code is generated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch.fx import GraphModule, Node

from overlapc.agreement.graph_text import GraphText, text_of
from overlapc.agreement.rank_agreement import GraphAgreement, Peers, PlansDiffer, hashes_of, peers_of
from overlapc.codegen.compiled_graph import CompiledGraph, order_hash
from overlapc.codegen.python import FIXED_NAMES
from overlapc.config import Config
from overlapc.estimators.base import Estimator
from overlapc.estimators.device import DeviceProfile
from overlapc.fx.comm.canonical import canonicalize, drop_unread
from overlapc.fx.comm.collectives import Collective, find_collectives, param_of
from overlapc.fx.comm.exchange import may_be_exchanged, travelling_bytes
from overlapc.fx.comm.fsdp2 import clean_up
from overlapc.fx.comm.group_names import GroupNames
from overlapc.fx.comm.inferred_labels import infer_labels
from overlapc.fx.comm.pack import CopyCosts, pack, packed_starts
from overlapc.fx.control import inline_control_deps
from overlapc.fx.masks.attention_masks import attention_counts, attention_kernels
from overlapc.fx.random import draw_once
from overlapc.fx.written_numbers import fill_empty_constants
from overlapc.fx.zero_tensors import keep_products_zero
from overlapc.graph_names import is_backward, kind_of
from overlapc.lowering import Communication
from overlapc.planning.agreed import KEPT_GATHERS, Agreed, Captured, Followed, key_of, peers_of_collectives, to_follow
from overlapc.planning.agreed_order import may_run_beside
from overlapc.planning.cached_copies import CopiesByPool, reopened, still_open
from overlapc.planning.chosen_profile import profile_of
from overlapc.planning.copy_rules import considers_copies, form_refused
from overlapc.planning.dumps import Dumps
from overlapc.planning.fused_ops import device_types
from overlapc.planning.graph_planner import GraphPlanner, Planned, described
from overlapc.planning.rank_notes import notes_of
from overlapc.planning.unequal_graphs import UnequalGraph, collective_lines
from overlapc.runtime.counters import count
from overlapc.schedule.collective_kinds import COPY
from overlapc.schedule.model import Comm

_NO_PACKING = CopyCosts(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Reused:
    """The result if nothing is planned because every rank has cached the compiled graph. copies: by group."""

    copies: CopiesByPool = field(default_factory=dict)


def plan_graph(
    gm: GraphModule,
    *,
    config: Config,
    name: str,
    dumps: Dumps,
    inner_estimates: Estimator,
    cached: CompiledGraph | None = None,
    is_inner: bool = False,
    will_run: bool = True,
    schedule_only: bool = False,
) -> Planned | Reused:
    """Run the stages up to the final schedule, before any code is generated.

    inner_estimates: estimates calls of inner graphs.
    cached: this graph from the disk cache; reused if every rank has cached it with the same order of collectives.
    is_inner: whether this is an inner graph of another one.
    will_run: False for a graph that is only planned, on torch's fake process group.
    schedule_only: the caller needs `Planned.scheduled` alone: no pass runs, no memory for copies is opened, and no
    later graph follows this one.
    """
    _rewrite(gm)
    dumps.write("fx", "graph", lambda: gm.print_readable(print_output=False))
    attention = attention_kernels(gm.graph)
    if attention:
        dumps.write("fx", "attention", lambda: "\n".join(f"{calls} {what}" for what, calls in attention.items()))
    collectives = find_collectives(gm.graph, config.safe_communication)
    communication = described(collectives)
    peers = peers_of_graph(communication, config)
    profile = profile_of(config, device_types(gm))
    by_copies = considers_copies(config, profile)
    key = key_of(name, config) if peers and not schedule_only else None
    known: list[Agreed] = peers.agreed[key] if peers is not None and key is not None else []
    captured = _captured(gm, collectives, by_copies, known[0].packing if known else _NO_PACKING)
    followed = to_follow(known, captured, peers) if peers is not None else None
    if followed is not None:
        config = without_measuring_kernels(config)
        peers = peers_of(followed.compiling_ranks) if followed.compiling_ranks else None
    alone = followed is not None and not followed.compiling_ranks
    with _agreement(peers, config, name, gm) as agreement:
        text = GraphText([]) if agreement is None else text_of(gm.graph, GroupNames(gm.graph), param_of)
        # Copies of a graph that is followed must be used, and ranks with unequal graphs use none.
        alike = [] if followed is not None and followed.agreed.copies is not None else collective_lines(collectives)
        copies, difference = _reused(cached, followed, agreement, text, alike, config)
        if cached is not None and copies is not None:
            if cached.agreed is not None and not alone:
                known.append(cached.agreed)
            return Reused(copies)
        if agreement is not None:
            profile = agreement.agree_on_profile(profile)
        packing = followed.agreed.packing if followed else _NO_PACKING if difference else _copy_costs(profile)
        captured = _captured(gm, collectives, by_copies, packing)
        keeps_unread = bool(difference) if followed is None else followed.agreed.keeps_unread
        if not keeps_unread and (agreement is not None or followed is not None or not will_run):
            drop_unread(gm)  # ranks have the same collectives to remove
        if pack(gm, packing):
            dumps.write("fx", "packed", lambda: gm.print_readable(print_output=False))
        planner = GraphPlanner(
            gm=gm,
            config=config,
            name=name,
            dumps=dumps,
            inner_estimates=inner_estimates,
            is_inner=is_inner,
            will_run=will_run,
            schedule_only=schedule_only,
            profile=profile,
            agreement=agreement,
            followed=followed,
        )
        planned = None
        if not difference:
            try:
                planned = planner.planned(communicates=bool(communication))
            except PlansDiffer as error:
                if not alike:
                    raise
                difference = str(error)
        if planned is None:
            assert agreement is not None, "only ranks that compare graphs find a difference"
            planned = UnequalGraph(planner, agreement, difference).planned()
    if followed is not None:
        count("graphs_in_an_agreed_order")
    if planned.agreed is not None and not alone:
        graph, sizes = order_hash(alike if difference else text.lines), hashes_of(text.sizes)
        kept = gm.meta.get(KEPT_GATHERS)
        agreed = replace(
            planned.agreed,
            graph=graph,
            sizes=sizes,
            captured=captured,
            packing=packing,
            kept=kept,
            keeps_unread=keeps_unread,
        )
        known.append(agreed)
        planned = replace(planned, agreed=agreed)
    counts = {} if is_backward(name) else attention_counts(gm.graph)
    kernels = attention + Counter(planned.scheduled.lowered.attention)
    return replace(planned, attention=kernels, attention_counts=counts)


def _rewrite(gm: GraphModule) -> None:
    """Bring the graph into the form that the stages after it expect."""
    inline_control_deps(gm)
    clean_up(gm)
    canonicalize(gm)
    fill_empty_constants(gm.graph)
    infer_labels(gm.graph)
    draw_once(gm.graph)
    keep_products_zero(gm.graph)
    for node in gm.graph.nodes:
        if node.name in FIXED_NAMES:  # nodes have the names of ops, which the user's libraries may have defined
            node._rename(f"{node.name}_")


def _reused(
    cached: CompiledGraph | None,
    followed: Followed[Agreed] | None,
    agreement: GraphAgreement | None,
    text: GraphText,
    alike: Sequence[str],
    config: Config,
) -> tuple[CopiesByPool | None, str]:
    """Return the copies of the cached graph if all ranks that compile it have cached it; None if it must be planned;
    and the first difference between the graphs of ranks if these have the same collectives, which `alike` describes."""
    opened = None
    if cached is not None and followed is not None:
        opened = still_open([cached]) if _may_follow(cached, followed) else None
        cached = None if opened is None else cached
    if agreement is not None:
        compared = agreement.agree_on_graph(text, "" if cached is None else cached.order, alike)
        if not compared.cached:
            return None, compared.difference
    if cached is not None and followed is None:
        opened = reopened([cached], config, agreement)
    return opened[0] if opened else None, ""


def _may_follow(cached: CompiledGraph, followed: Followed[Agreed]) -> bool:
    """Whether a cached graph has the order and the copy layouts that ranks agreed on for an earlier graph."""
    if not followed.compiling_ranks:
        return cached.order == followed.agreed.order
    if cached.agreed is None or not may_run_beside(cached.agreed, followed):
        return False
    copies, earlier = cached.agreed.copies, followed.agreed.copies
    layouts = {} if copies is None else copies.layouts
    return layouts == ({} if earlier is None else earlier.without(followed.resized).layouts)


def without_measuring_kernels(config: Config) -> Config:
    """Return `config` without the options that choose code by timing kernels: for a plan that no other rank makes, or
    that no code is generated from."""
    matmul = "library" if config.matmul == "autotune" else config.matmul
    return replace(config, autotune=False, benchmark_fusion=False, matmul=matmul)


def _agreement(
    peers: Peers | None, config: Config, name: str, gm: GraphModule
) -> AbstractContextManager[GraphAgreement | None]:
    if peers is None:
        return nullcontext()
    return peers.agreement(kind_of(name), config.rank_timeout, notes_of(gm, config))


def peers_of_graph(communication: Mapping[Node, Communication], config: Config) -> Peers | None:
    """Return the ranks that compile this graph too; None if it does not communicate."""
    if not (config.rank_check and communication and dist.is_initialized()):
        return None
    return peers_of_collectives((found.comm for found in communication.values()), config)


def _captured(gm: GraphModule, collectives: Sequence[Collective], by_copies: bool, packing: CopyCosts) -> Captured:
    """Return the collectives as `to_follow` compares them. packing: costs by which they are packed."""
    packed = packed_starts(gm.graph, packing)
    return tuple((each.start.name, as_sent(each, by_copies, each.start in packed)) for each in collectives)


def as_sent(collective: Collective, by_copies: bool, packed: bool = False) -> Comm:
    """Return the collective with the bytes that it sends, and with the transport that it has where copies reach its
    ranks. by_copies: whether copies may carry collectives.

    Graphs of one function differ in these although their collectives have the same data: copies carry none of symbolic
    size, and a step that adds gradients of earlier micro-batches before it reduces them sends float32 where other steps
    send bfloat16 (all ranks take such a step together, so all of them compile its graph).

    A collective whose result is not read is marked, because it is removed: a graph that runs it cannot follow one that
    does not. So is one that is `packed` together with others, which depends on strides and on which sizes are symbolic.
    """
    start, comm = collective.start, collective.comm
    if collective.unread or packed:
        comm = replace(comm, variant=f"{comm.variant} {'unread' if collective.unread else 'packed'}")
    sent = replace(comm, bytes=travelling_bytes(start)) if may_be_exchanged(start) else comm
    return replace(sent, via=COPY) if by_copies and form_refused(collective) is None else sent


def _copy_costs(profile: DeviceProfile) -> CopyCosts:
    byte_ns = 1e9 / profile.memory_bytes_per_s if profile.memory_bytes_per_s else 0.0
    return CopyCosts(profile.coalesced_tensor_ns, profile.kernel_floor_ns, byte_ns)
