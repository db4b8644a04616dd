"""From an FX graph to its final schedule: the stages before any code is generated, agreed between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from overlapc.autotune import Tuning, tune
from overlapc.codegen.bucket_payload import merge_starts
from overlapc.codegen.compiled_graph import CompiledGraph, order_hash
from overlapc.codegen.copies import Copied, forms_of, laid_out_bytes, peak_before, peak_with_pools
from overlapc.codegen.sources import Sources, compile_ahead, with_scratch
from overlapc.config import Config
from overlapc.errors import CompileError, MemoryBudgetError, NoSharedMemory
from overlapc.estimators.agreement.graph_text import canonical_lines
from overlapc.estimators.agreement.rank_agreement import GraphAgreement, Peers, peers_of, spanned_ranks
from overlapc.estimators.base import Estimator, estimate_schedule
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.roofline import Roofline
from overlapc.fusion.combo import kind_of, one_launch
from overlapc.fusion.to_schedule import to_schedule
from overlapc.fx.attention_masks import attention_counts, attention_kernels
from overlapc.fx.canonical import canonicalize
from overlapc.fx.collectives import Collective, find_collectives
from overlapc.fx.control import inline_control_deps
from overlapc.fx.exchange import may_be_exchanged, travelling_bytes
from overlapc.fx.fsdp2 import clean_up
from overlapc.fx.graph_copy import copied
from overlapc.fx.group_names import GroupNames
from overlapc.fx.inferred_labels import infer_labels
from overlapc.fx.pack import CopyCosts, pack
from overlapc.fx.random import draw_once
from overlapc.fx.taken_out import take_out
from overlapc.fx.versions.graphs import donated_inputs
from overlapc.fx.written_numbers import fill_empty_constants
from overlapc.ir.ops import Combo, IROp, Loops, LoweredGraph, Start
from overlapc.lowering import Communication
from overlapc.passes.base import Context
from overlapc.passes.run import Result, run_pipeline
from overlapc.planning.agreed import Agreed, Followed, forget_before_reset, key_of, to_follow
from overlapc.planning.agreed_order import SlotsInUse, agreed_on, follow, may_run_beside
from overlapc.planning.cached_copies import CopiesByPool, reopened, still_open
from overlapc.planning.chosen_profile import profile_of
from overlapc.planning.dumps import Dumps
from overlapc.planning.estimator_chain import chain_of
from overlapc.planning.fused_ops import GraphToFuse, device_types
from overlapc.planning.host_groups import DividedGroup
from overlapc.planning.pass_context import context_of
from overlapc.planning.rank_notes import notes_of
from overlapc.planning.transports import AUTO, Transports, carried
from overlapc.report import record
from overlapc.report.drawing import to_dot
from overlapc.report.held_memory import held_bytes, inputs
from overlapc.report.walk_through import walk_through
from overlapc.runtime.counters import count
from overlapc.runtime.phases import phase
from overlapc.runtime.steps import STEPS
from overlapc.schedule.model import COMMUNICATION, Comm, Estimate, Schedule
from overlapc.units import human_bytes

Passes = Callable[[Schedule, Context], Result]
# Key in `GraphModule.meta` of a forward: backward's peak bytes outside of the shared memory for copies, if known.
BESIDE_POOLS = "overlapc_beside_pools"


@dataclass(frozen=True)
class Reused:
    """The result if nothing is planned because every rank has cached the compiled graph. copies: by group."""

    copies: CopiesByPool = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """The result of planning: the passes' result, the graph in loop IR, and the measured times of its kernels."""

    result: Result
    lowered: LoweredGraph
    sources: Sources  # those of its kernels
    tuning: Tuning | None = None
    copies: Mapping[str, Copied] = field(default_factory=dict)  # start -> how generated code copies it
    not_copied: Mapping[str, str] = field(default_factory=dict)  # collective that should use copies -> why it does not
    attention: Mapping[str, int] = field(default_factory=dict)  # the report's text about a kernel -> number of calls
    attention_counts: Mapping[str, int] = field(default_factory=dict)
    agreed: Agreed | None = None  # what ranks agreed on; None for a graph that does not communicate
    divided: Sequence[DividedGroup] = ()  # groups that span several hosts and are divided for this graph


def plan_graph(
    gm: GraphModule,
    *,
    config: Config,
    name: str,
    dumps: Dumps,
    inner_estimates: Estimator,
    cached: CompiledGraph | None = None,
    passes: Passes = run_pipeline,
    is_inner: bool = False,
    will_run: bool = True,
    for_partitioning: bool = False,
) -> Planned | Reused:
    """Run the stages up to the final schedule, before any code is generated.

    inner_estimates: estimates calls of inner graphs.
    cached: this graph from the disk cache; reused if every rank has cached it with the same order of collectives.
    is_inner: whether this is an inner graph of another one.
    will_run: False for a graph that is only planned, on torch's fake process group.
    for_partitioning: the plan only decides how the step is partitioned: no memory for copies is opened, and no later
    graph follows it.
    """
    inline_control_deps(gm)
    clean_up(gm)
    canonicalize(gm)
    fill_empty_constants(gm.graph)
    infer_labels(gm.graph)
    draw_once(gm.graph)
    dumps.write("fx", "graph", lambda: gm.print_readable(print_output=False))
    attention = attention_kernels(gm.graph)
    if attention:
        dumps.write("fx", "attention", lambda: "\n".join(f"{calls} {what}" for what, calls in attention.items()))
    communication = described(find_collectives(gm.graph, config.safe_communication))
    stages = partial(
        _stages,
        gm,
        name=name,
        dumps=dumps,
        inner_estimates=inner_estimates,
        is_inner=is_inner,
        will_run=will_run,
        opens_copies=not for_partitioning,
    )
    peers = peers_of_graph(communication, config)
    if peers is not None:
        forget_before_reset(peers)
    captured = tuple((node.name, as_sent(node, found.comm)) for node, found in communication.items())
    key = key_of(name, config) if peers and not for_partitioning else None
    known: list[Agreed] = peers.agreed[key] if peers is not None and key is not None else []
    followed = to_follow(known, captured, peers) if peers is not None else None
    if followed is not None:
        config = without_measuring_kernels(config)
        peers = peers_of(followed.compiling_ranks) if followed.compiling_ranks else None
    alone = followed is not None and not followed.compiling_ranks
    with _agreement(peers, config, name, gm) as agreement:
        lines = [] if agreement is None else canonical_lines(gm.graph, GroupNames(gm.graph).__getitem__)
        copies = _reused(cached, followed, agreement, lines, config)
        if cached is not None and copies is not None:
            if cached.agreed is not None and not alone:
                known.append(cached.agreed)
            return Reused(copies)
        planned = stages(
            config=config, communication=communication, agreement=agreement, followed=followed, passes=passes
        )
    if followed is not None:
        count("graphs_in_an_agreed_order")
    if planned.agreed is not None and not alone:
        agreed = replace(planned.agreed, graph=order_hash(lines), captured=captured)
        known.append(agreed)
        planned = replace(planned, agreed=agreed)
    counts = {} if name.startswith("backward") else attention_counts(gm.graph)
    return replace(planned, attention=attention + Counter(planned.lowered.attention), attention_counts=counts)


def _reused(
    cached: CompiledGraph | None,
    followed: Followed[Agreed] | None,
    agreement: GraphAgreement | None,
    lines: Sequence[str],
    config: Config,
) -> CopiesByPool | None:
    """Return the copies of the cached graph if all ranks that compile it have cached it; None if it must be planned."""
    opened = None
    if cached is not None and followed is not None:
        opened = still_open([cached]) if _may_follow(cached, followed) else None
        cached = None if opened is None else cached
    if agreement is not None and not agreement.agree_on_graph(lines, "" if cached is None else cached.order):
        return None
    if cached is not None and followed is None:
        opened = reopened([cached], config, agreement)
    return opened[0] if opened else None


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


def _stages(
    gm: GraphModule,
    *,
    config: Config,
    name: str,
    dumps: Dumps,
    inner_estimates: Estimator,
    is_inner: bool,
    will_run: bool,
    opens_copies: bool,
    communication: dict[Node, Communication],
    agreement: GraphAgreement | None,
    followed: Followed[Agreed] | None,
    passes: Passes,
) -> Planned:
    """Run the stages after ranks have agreed on the graph. followed: the graph whose order must be followed, if any."""
    profile = profile_of(config, device_types(gm))
    if agreement is not None:
        profile = agreement.agree_on_profile(profile)
    if pack(gm, _copy_costs(profile)):
        dumps.write("fx", "packed", lambda: gm.print_readable(print_output=False))
    transports = Transports()
    if communication:
        if followed is None:
            transports = Transports.of(gm, config, agreement, is_inner, profile, will_run)
        elif followed.agreed.copies is not None:
            transports = Transports.following(followed.agreed.copies, followed.resized)
    stages = partial(
        _scheduled,
        gm,
        config=config,
        name=name,
        inner_estimates=inner_estimates,
        profile=profile,
        agreement=agreement,
        followed=followed,
        passes=passes,
        dumps=dumps,
        generates_code=will_run and opens_copies,
    )
    before = copied(gm.graph) if config.transport == AUTO and transports.wanted and followed is None else None
    try:
        planned = _in_slots(stages, gm, config, transports)
        if followed is None:  # else it uses the memory that is open already
            _check_forward(planned.result.schedule)
        copies = transports.opened(planned.result.schedule) if opens_copies else {}
    except (MemoryBudgetError, NoSharedMemory) as error:  # raised on all ranks, or on none
        if before is None or not transports.groups:
            raise
        gm.graph = before
        planned = stages(transports=Transports())
        reason = str(error).splitlines()[0]
        if isinstance(error, MemoryBudgetError) and error.peak_bytes is not None:
            peak = human_bytes(error.peak_bytes)
            reason = f"the shared memory for copies would raise the peak to {peak}, over memory_budget"
        return replace(planned, not_copied={", ".join(sorted(transports.groups)): reason})
    if planned.agreed is not None and copies:
        planned = replace(planned, agreed=replace(planned.agreed, copies=transports.agreed))
    return replace(planned, copies=copies, not_copied=transports.reasons, divided=list(transports.divided.values()))


def _in_slots(stages: Callable[..., Planned], gm: GraphModule, config: Config, transports: Transports) -> Planned:
    """Plan with copies. If a graph needs slots longer than the one that it follows, it copies results out of them."""
    try:
        return stages(transports=transports)
    except SlotsInUse as error:
        collectives = find_collectives(gm.graph, config.safe_communication)
        waits = [
            wait for collective in collectives if collective.start.name in error.starts for wait in collective.waits
        ]
        take_out(waits)
        count("results_taken_out_of_slots", len(waits))
        return stages(transports=transports)


def _scheduled(
    gm: GraphModule,
    *,
    config: Config,
    name: str,
    inner_estimates: Estimator,
    profile: DeviceProfile,
    agreement: GraphAgreement | None,
    followed: Followed[Agreed] | None,
    passes: Passes,
    transports: Transports,
    dumps: Dumps,
    generates_code: bool,
) -> Planned:
    """Run the stages after the choice of transports, up to the agreement on the order of collectives."""
    communication = described(carried(gm, config.safe_communication, transports))
    if transports.rewritten:
        dumps.write("fx", "exchanged", lambda: gm.print_readable(print_output=False))
    freeable = _freeable(gm, name)
    lowered, fusion = GraphToFuse(gm, name, config, communication, agreement, freeable, dumps).fused()
    with phase("fusion"):
        schedule = to_schedule(lowered.ops, lowered, freeable, config.memory_budget, fusion.kernel_of)
    dumps.write("fusion", "decisions", lambda: str(fusion))
    with phase("estimates"):
        tuning = _tuned(schedule, lowered, profile, config, agreement)
    if tuning is not None:
        dumps.write("kernels", "tuning", lambda: str(tuning))
    chain = chain_of(profile, config, lowered, inner_estimates, tuning)
    with phase("estimates"):
        schedule = _estimated(schedule, chain, agreement)
    sources = Sources(lowered, None if tuning is None else tuning.sources)
    if generates_code and tuning is None:  # not earlier: threads would disturb what estimates measure
        with phase("code"):
            compile_ahead(schedule, sources, config.cache_dir)
    if generates_code:
        schedule = with_scratch(schedule, sources)
    if agreement is not None:
        schedule = _with_common_sizes(schedule, agreement)
    schedule = _beside_what_is_held(schedule)
    forward = record.forward(name)
    # Backward runs beside the shared memory of its forward's copies: a forward leaves room for what its backward needs.
    peak_of = partial(peak_before, beside_pools_bytes=gm.meta.get(BESIDE_POOLS, 0))
    if forward is not None:
        peak_of = partial(peak_with_pools, at_least_bytes=forward.pool_bytes)
    context = replace(
        context_of(config, profile, chain),
        peak_of=peak_of,
        merge_payloads=_merged,
        kernel_kind=kind_of if config.fusion else None,
        dump=dumps.writer("passes"),
    )
    if followed is None:
        with phase("passes"):
            result = passes(schedule, context)
        if BESIDE_POOLS in gm.meta:  # reports state the memory of this graph alone
            result = replace(result, incoming_peak_bytes=peak_with_pools(schedule))
    else:
        result = _following(followed, schedule, context, transports)
    dumps.write("passes", "walk", lambda: walk_through(result.after))
    dumps.write("passes", "schedule", lambda: to_dot(result.schedule), suffix="dot")
    agreed = None if followed is None else followed.agreed
    if agreement is not None:
        agreement.agree_on_order(collective_lines(result.schedule))
        agreed = agreed_on(schedule, result, collective_lines(result.schedule), followed)
    return Planned(result, lowered, sources, tuning, agreed=agreed)


def _following(followed: Followed[Agreed], schedule: Schedule, context: Context, transports: Transports) -> Result:
    """Return the best plan that has the agreed order and copy layouts; CompileError if there is none."""
    refuse: Callable[[str], CompileError] = CompileError
    obstacle = "This graph's data dependences make"
    hint = '{"reorder_collectives": False} keeps the order of the program in every graph'
    for result in follow(schedule, followed, context):
        if may_run_beside(agreed_on(schedule, result, collective_lines(result.schedule), followed), followed):
            if transports.fits(result.schedule):
                return result
            refuse = partial(SlotsInUse, starts=[name for name, form in forms_of(schedule).items() if form.in_pool])
            obstacle = "This graph's shared memory for copies makes"
            hint = '{"transport": "nccl"} uses no copies'
    raise refuse(
        f"{schedule.name}: this function was compiled before for other sizes or arguments, and other ranks may run that"
        " graph in the same step, so both graphs must launch their collectives in the same order."
        f" {obstacle} that order impossible (after {STEPS.stepped} optimizer steps)"
        f"\nhint: options={hint}; torch.compile(..., dynamic=True) compiles one graph for all sizes"
    )


# --- communication and agreement


def described(collectives: Sequence[Collective]) -> dict[Node, Communication]:
    return {found.start: Communication(found.comm, asynchronous=not found.synchronous) for found in collectives}


def _agreement(
    peers: Peers | None, config: Config, name: str, gm: GraphModule
) -> AbstractContextManager[GraphAgreement | None]:
    if peers is None:
        return nullcontext()
    return peers.agreement(name.split("_")[0], config.rank_timeout, notes_of(gm, config))


def peers_of_graph(communication: Mapping[Node, Communication], config: Config) -> Peers | None:
    """Return the ranks that compile this graph too; None if it does not communicate."""
    if not (config.rank_check and communication and dist.is_initialized()):
        return None
    groups = {found.comm.ranks for found in communication.values() if found.comm.ranks}
    ranks = spanned_ranks(dist.get_rank(), groups, dist.get_world_size())
    return peers_of(ranks)


def as_sent(start: Node, comm: Comm) -> Comm:
    """Return `comm` with the bytes that an exchange in place of a reduction would send.

    A step that adds gradients of earlier micro-batches before it reduces them sends float32 where other steps send
    bfloat16. All ranks take such a step together, so all of them compile its graph.
    """
    if may_be_exchanged(start):
        return replace(comm, bytes=travelling_bytes(start))
    return comm


def collective_lines(schedule: Schedule) -> list[str]:
    """Return one line per launch in execution order; ranks with the same order have the same lines."""
    return [
        f"{node.comm.carried} {node.name} @{node.comm.group}({node.comm.size}) {node.comm.bytes}B"
        for node in schedule.nodes
        if node.kind in COMMUNICATION and node.comm is not None
    ]


# --- estimates and memory


def _freeable(gm: GraphModule, name: str) -> set[str]:
    """Return the inputs that the graph may free: what forward saved for backward, except parameters and user inputs."""
    if not name.startswith("backward"):
        return set()
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    donated = donated_inputs()
    if donated is not None:
        return {names[at] for at in donated}
    return {saved for saved in names if not saved.startswith(("primals_", "tangents_"))}


def _estimated(schedule: Schedule, chain: Estimator, agreement: GraphAgreement | None) -> Schedule:
    """Return `schedule` with estimates, which are the medians of all ranks' estimates."""
    schedule = estimate_schedule(schedule, chain)
    if agreement is not None:
        known = {node.name: node.estimate for node in schedule.nodes if node.estimate is not None}
        agreed = agreement.agree_on_medians({name: estimate.ns for name, estimate in known.items()})
        schedule = schedule.with_estimates({name: Estimate(agreed[name], known[name].source) for name in known})
    return schedule


def _with_common_sizes(schedule: Schedule, agreement: GraphAgreement) -> Schedule:
    """Return `schedule` with every buffer, and the scratch memory of every node, as large as on the rank where it is
    largest.

    Shards of a parameter differ in size if it does not divide evenly. With different sizes, passes would reach their
    memory limit on one rank earlier than on another, and a budget has to hold on all ranks.
    """
    sizes = {name: buffer.bytes for name, buffer in schedule.buffers.items()}
    scratch = {f"scratch memory of {node.name}": node.scratch_bytes for node in schedule.nodes}
    largest = agreement.agree_on_largest(sizes | scratch)
    nodes = tuple(
        node if node.scratch_bytes == most else replace(node, scratch_bytes=most)
        for node, most in zip(schedule.nodes, map(largest.__getitem__, scratch), strict=True)
    )
    buffers = {name: replace(buffer, bytes=largest[name]) for name, buffer in schedule.buffers.items()}
    return replace(schedule, nodes=nodes, buffers=buffers)


def _beside_what_is_held(schedule: Schedule) -> Schedule:
    """Return `schedule` with its budget reduced by the memory of inputs that only its forward received: during backward
    they are still alive."""
    if schedule.budget_bytes is None:
        return schedule
    taken = {name: buffer for name, buffer in schedule.buffers.items() if buffer.is_input}
    forward = record.forward(schedule.name)
    held = 0 if forward is None else held_bytes(inputs(forward), taken)
    return replace(schedule, budget_bytes=max(0, schedule.budget_bytes - held))


def _check_forward(schedule: Schedule) -> None:
    """Raise MemoryBudgetError if the shared memory for copies of the backward `schedule` would raise its forward's peak
    over forward's budget: all graphs use the same shared memory, as large as the graph that needs most makes it."""
    forward = record.forward(schedule.name)
    if forward is None or forward.budget_bytes is None:
        return
    peak = forward.peak_bytes + max(0, laid_out_bytes(schedule) - forward.pool_bytes)
    if peak > forward.budget_bytes:
        raise MemoryBudgetError(
            f"{schedule.name}: its shared memory for copies would raise the peak of {forward.name} to"
            f" {human_bytes(peak)}, over memory_budget"
            '\nhint: raise memory_budget, or set options={"transport": "auto"}, which then uses the library',
            peak,
        )


def _merged(payloads: Sequence[IROp]) -> IROp | str:
    """Return the payload of one launch for several nodes of one kind, or the reason why they cannot share a launch."""
    starts = [op for op in payloads if isinstance(op, Start)]
    return merge_starts(starts) if starts else one_launch([op for op in payloads if isinstance(op, Loops | Combo)])


def _tuned(
    schedule: Schedule, lowered: LoweredGraph, profile: DeviceProfile, config: Config, agreement: GraphAgreement | None
) -> Tuning | None:
    """Return the measured times of the schedule's kernels in several block sizes; None without `autotune`."""
    if not config.autotune or torch.are_deterministic_algorithms_enabled():
        return None
    seconds = config.autotune_seconds
    return tune(schedule, lowered, Roofline(profile).estimate, config.cache_dir, seconds=seconds, agreement=agreement)


def _copy_costs(profile: DeviceProfile) -> CopyCosts:
    byte_ns = 1e9 / profile.memory_bytes_per_s if profile.memory_bytes_per_s else 0.0
    return CopyCosts(profile.coalesced_tensor_ns, profile.kernel_floor_ns, byte_ns)
