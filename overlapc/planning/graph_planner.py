"""Plans one graph: from FX nodes to its schedule, and on to the order that passes choose or that ranks agreed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.fx import GraphModule, Node

from overlapc.agreement.rank_agreement import GraphAgreement, PlansDiffer
from overlapc.autotune import Tuning, tune
from overlapc.codegen.bucket_payload import merge_starts
from overlapc.codegen.copies import Copied, forms_of, laid_out_bytes, peak_before, peak_with_pools
from overlapc.codegen.sources import Sources, compile_ahead, with_scratch
from overlapc.config import Config
from overlapc.errors import CompileError, MemoryBudgetError, NoSharedMemory, RanksDisagree
from overlapc.estimators.base import Estimator, FirstKnown, estimate_schedule
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.roofline import Roofline
from overlapc.fusion.combo import kind_of, one_launch
from overlapc.fusion.to_schedule import to_schedule
from overlapc.fx.comm.collectives import Collective
from overlapc.fx.comm.taken_out import take_out
from overlapc.fx.graph_copy import copied
from overlapc.fx.versions.graphs import donated_inputs
from overlapc.graph_names import is_backward
from overlapc.ir.ops import Combo, IROp, Loops, LoweredGraph, Start
from overlapc.lowering import Communication
from overlapc.passes.base import Context
from overlapc.passes.run import Result, run_pipeline
from overlapc.planning.agreed import KEPT_GATHERS, Agreed, Followed, KeptGathers
from overlapc.planning.agreed_order import OrderImpossible, SlotsInUse, agreed_on, follow, may_run_beside
from overlapc.planning.copy_rules import AUTO, CopyRules
from overlapc.planning.dumps import Dumps
from overlapc.planning.estimator_chain import chain_of
from overlapc.planning.fused_ops import GraphToFuse
from overlapc.planning.pass_context import context_of
from overlapc.planning.transports import Transports
from overlapc.report import record
from overlapc.report.drawing import to_dot
from overlapc.report.held_memory import held_bytes, inputs
from overlapc.report.walk_through import walk_through
from overlapc.runtime.counters import count
from overlapc.runtime.phases import phase
from overlapc.runtime.steps import STEPS
from overlapc.schedule.model import Estimate, Schedule
from overlapc.schedule.model import Node as ScheduleNode
from overlapc.units import human_bytes


@dataclass(frozen=True)
class Scheduled:
    """A graph before the passes: its schedule with estimates, the context of the passes, and the graph in loop IR."""

    schedule: Schedule
    context: Context
    lowered: LoweredGraph
    sources: Sources  # of its kernels
    tuning: Tuning | None = None  # the measured times of its kernels


@dataclass(frozen=True)
class Planned:
    """The result of planning: the graph before the passes, and what they made of it."""

    scheduled: Scheduled
    result: Result
    transports: Transports
    order: Agreed  # of its collectives, as graphs that follow it would need it
    copies: Mapping[str, Copied] = field(default_factory=dict)  # start -> how generated code copies it
    not_copied: Mapping[str, str] = field(default_factory=dict)  # collective that should use copies -> why it does not
    attention: Mapping[str, int] = field(default_factory=dict)  # the report's text about a kernel -> number of calls
    attention_counts: Mapping[str, int] = field(default_factory=dict)
    agreed: Agreed | None = None  # what ranks agreed on; None for a graph that does not communicate


@dataclass(frozen=True)
class GraphPlanner:
    """Plans `gm`, whose ranks have agreed that they plan the same graph. `config` to `schedule_only`: see `plan_graph`.

    agreement: with the other ranks that plan this graph; None if no rank does.
    followed: the earlier graph whose order of collectives must be followed, if any.
    """

    gm: GraphModule
    config: Config
    name: str
    dumps: Dumps
    inner_estimates: Estimator
    is_inner: bool
    will_run: bool
    schedule_only: bool
    profile: DeviceProfile
    agreement: GraphAgreement | None
    followed: Followed[Agreed] | None

    def planned(self, communicates: bool) -> Planned:
        """Plan the graph with the transports that ranks choose for its collectives."""
        rules = self._copy_rules() if communicates else None
        may_undo = self.config.transport == AUTO and rules is not None and self.followed is None
        before = copied(self.gm.graph) if may_undo else None
        transports = self._chosen(rules)
        try:
            planned = self._in_slots(transports)
            if self.followed is None:  # else it uses the memory that is open already
                _check_forward(planned.result.schedule)
            copies, agreed = ({}, None) if self.schedule_only else planned.transports.opened(planned.result.schedule)
        except (MemoryBudgetError, NoSharedMemory) as error:  # raised on all ranks, or on none
            if before is None or not transports.groups:
                raise
            self.gm.graph = before
            planned = self._with(self._chosen(None))
            return replace(planned, not_copied={", ".join(sorted(transports.groups)): _reason(error)})
        except PlansDiffer as error:
            if before is not None:
                self.gm.graph = before
            elif transports.rewritten:
                raise RanksDisagree(str(error)) from error
            raise
        if planned.agreed is not None and agreed is not None:
            planned = replace(planned, agreed=replace(planned.agreed, copies=agreed))
        return replace(planned, copies=copies, not_copied=planned.transports.reasons)

    def _copy_rules(self) -> CopyRules | None:
        if self.followed is None:
            return CopyRules.of(self.gm, self.config, self.agreement, self.is_inner, self.profile, self.will_run)
        copies = self.followed.agreed.copies
        return None if copies is None else CopyRules.following(copies, self.followed.resized)

    def _chosen(self, rules: CopyRules | None) -> Transports:
        transports = Transports.chosen(self.gm, self.config.safe_communication, rules)
        if transports.rewritten:
            self.dumps.write("fx", "exchanged", lambda: self.gm.print_readable(print_output=False))
        return transports

    def _in_slots(self, transports: Transports) -> Planned:
        """Plan with copies. If a graph needs slots longer than the one that it follows, it copies results out of
        them."""
        try:
            return self._with(transports)
        except SlotsInUse as error:
            starts = (collective for collective in transports.collectives if collective.start.name in error.starts)
            waits = [wait for collective in starts for wait in collective.waits]
            take_out(waits)
            count("results_taken_out_of_slots", len(waits))
            return self._with(transports.for_changed(self.gm, self.config.safe_communication))

    def _with(self, transports: Transports) -> Planned:
        """Plan the graph with these transports, and let ranks agree on the order of collectives."""
        scheduled = self._scheduled(transports)
        schedule, context = scheduled.schedule, scheduled.context
        if self.schedule_only:
            result = run_pipeline(schedule, replace(context, passes=(), stop_after=None, dump=None))
        elif self.followed is None:
            with phase("passes"):
                result = run_pipeline(schedule, context)
            if KEPT_GATHERS in self.gm.meta:  # reports state the memory of this graph alone
                result = replace(result, incoming_peak_bytes=peak_with_pools(schedule))
        else:
            result = _following(self.followed, schedule, context, transports)
        order = agreed_on(schedule, result, self.followed)
        self.dumps.write("passes", "walk", lambda: walk_through(result.after))
        self.dumps.write("passes", "schedule", lambda: to_dot(result.schedule), suffix="dot")
        agreed = None if self.followed is None else self.followed.agreed
        if self.agreement is not None:
            self.agreement.agree_on_order(order.lines)
            agreed = order
        return Planned(scheduled, result, transports, order, agreed=agreed)

    def _scheduled(self, transports: Transports) -> Scheduled:
        """Run the stages before the passes."""
        config, agreement, dumps = self.config, self.agreement, self.dumps
        communication = described(transports.collectives)
        freeable = freeable_inputs(self.gm, self.name)
        lowered, fusion = GraphToFuse(self.gm, self.name, config, communication, agreement, freeable, dumps).fused()
        with phase("fusion"):
            schedule = to_schedule(lowered.ops, lowered, freeable, config.memory_budget, fusion.kernel_of)
        dumps.write("fusion", "decisions", lambda: str(fusion))
        with phase("estimates"):
            tuning = _tuned(schedule, lowered, self.profile, config, agreement)
        if tuning is not None:
            dumps.write("kernels", "tuning", lambda: str(tuning))
        chain = chain_of(self.profile, config, lowered, self.inner_estimates, tuning)
        with phase("estimates"):
            schedule = _estimated(schedule, chain, agreement)
        sources = Sources(lowered, None if tuning is None else tuning.sources)
        if self.will_run and not self.schedule_only:
            if tuning is None:  # not earlier: threads would disturb what estimates measure
                with phase("code"):
                    compile_ahead(schedule, sources, config.cache_dir)
            schedule = with_scratch(schedule, sources)
        if agreement is not None:
            schedule = _with_common_sizes(schedule, agreement)
        schedule = _beside_what_is_held(schedule)
        return Scheduled(schedule, self._context(chain), lowered, sources, tuning)

    def _context(self, chain: Estimator) -> Context:
        forward = record.forward(self.name)
        # Backward runs beside the shared memory of its forward's copies: a forward leaves room for what its backward
        # needs.
        kept: KeptGathers | None = self.gm.meta.get(KEPT_GATHERS)
        peak_of = partial(peak_before, beside_pools_bytes=0 if kept is None else kept.beside_pools_bytes)
        if forward is not None:
            peak_of = partial(peak_with_pools, at_least_bytes=forward.pool_bytes)
        return replace(
            context_of(self.config, self.profile, chain),
            peak_of=peak_of,
            merge_payloads=_merged,
            kernel_kind=kind_of if self.config.fusion else None,
            dump=self.dumps.writer("passes"),
        )


def _reason(error: MemoryBudgetError | NoSharedMemory) -> str:
    """Return the report's reason why a graph uses no copies."""
    if isinstance(error, MemoryBudgetError) and error.peak_bytes is not None:
        peak = human_bytes(error.peak_bytes)
        return f"the shared memory for copies would raise the peak to {peak}, over memory_budget"
    return str(error).splitlines()[0]


def _following(followed: Followed[Agreed], schedule: Schedule, context: Context, transports: Transports) -> Result:
    """Return the best plan that has the agreed order and copy layouts; CompileError if there is none."""
    refuse: Callable[[str], CompileError] = OrderImpossible
    obstacle = "This graph's data dependences make"
    hint = '{"reorder_collectives": False} keeps the order of the program in every graph'
    for result in follow(schedule, followed, context):
        if may_run_beside(agreed_on(schedule, result, followed), followed):
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


def described(collectives: Sequence[Collective]) -> dict[Node, Communication]:
    return {found.start: Communication(found.comm, asynchronous=not found.synchronous) for found in collectives}


# --- estimates and memory


def freeable_inputs(gm: GraphModule, name: str) -> set[str]:
    """Return the inputs that the graph may free: what forward saved for backward, except parameters and user inputs."""
    if not is_backward(name):
        return set()
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    donated = donated_inputs()
    if donated is not None:
        return {names[at] for at in donated}
    return {saved for saved in names if not saved.startswith(("primals_", "tangents_"))}


def _estimated(schedule: Schedule, chain: FirstKnown, agreement: GraphAgreement | None) -> Schedule:
    """Return `schedule` with estimates, which are the medians of all ranks' estimates."""
    schedule = estimate_schedule(schedule, chain)
    chain.store()
    if agreement is not None:
        known = {node.name: node.estimate for node in schedule.nodes if node.estimate is not None}
        agreed = agreement.agree_on_medians({name: estimate.ns for name, estimate in known.items()})
        schedule = schedule.with_estimates({name: Estimate(agreed[name], known[name].source) for name in known})
    return schedule


def _with_common_sizes(schedule: Schedule, agreement: GraphAgreement) -> Schedule:
    """Return `schedule` with every buffer, and the scratch memory and communicated data of every node, as large as on
    the rank where it is largest.

    Shards of a parameter differ in size if it does not divide evenly, and so do the parts of an all-to-all. With
    different sizes, passes would reach their memory limit on one rank earlier than on another, and a budget has to hold
    on all ranks.
    """
    sizes = {name: buffer.bytes for name, buffer in schedule.buffers.items()}
    scratch = {_scratch_of(node): node.scratch_bytes for node in schedule.nodes}
    moved = {_data_of(node): node.comm.bytes for node in schedule.nodes if node.comm is not None}
    largest = agreement.agree_on_largest(sizes | scratch | moved)

    def common(node: ScheduleNode) -> ScheduleNode:
        most = largest[_scratch_of(node)]
        comm = None if node.comm is None else replace(node.comm, bytes=largest[_data_of(node)])
        same = (most, comm) == (node.scratch_bytes, node.comm)
        return node if same else replace(node, scratch_bytes=most, comm=comm)

    buffers = {name: replace(buffer, bytes=largest[name]) for name, buffer in schedule.buffers.items()}
    return replace(schedule, nodes=tuple(map(common, schedule.nodes)), buffers=buffers)


def _scratch_of(node: ScheduleNode) -> str:
    return f"scratch memory of {node.name}"


def _data_of(node: ScheduleNode) -> str:
    return f"data of {node.name}"


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
