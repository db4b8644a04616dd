"""Where the time of a step goes, how short the step could be, and what to change, by the time that it may save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overlapc import documents
from overlapc.estimators.profiles.profile_file import profile_from_json
from overlapc.graph_names import is_backward, is_forward
from overlapc.report.advice import OF_ORDER, Cause, Exposure, exposed_is_measured, exposures
from overlapc.report.held_memory import peak_parts, step_peak_bytes
from overlapc.report.kept_gathered import saved_by_keeping, savings_text
from overlapc.report.limiting_factor import FOR_THE_HOST, Spent
from overlapc.report.model import Measured, StepRecord, measured_step, seen_ns
from overlapc.report.parsed_schedules import schedule_of
from overlapc.report.times import ms
from overlapc.schedule.model import COMPUTE, Kind, Node
from overlapc.units import human_bytes

_LEAST = 0.005  # fraction of a step; changes that save less are not listed


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step's time; `kind` selects its color."""

    name: str
    ns: float
    kind: str


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The time of a step under one ideal assumption, such as fully hidden communication."""

    name: str
    ns: float


@dataclass(frozen=True, slots=True)
class Gain:
    """A change, and an upper bound of the time that it saves. Gains overlap, so they must not be added."""

    ns: float
    why: str
    advice: str
    measured: bool = False  # else predicted


@dataclass(frozen=True)
class Ledger:
    """The predicted time of a step, its parts and ceilings, and the changes that would shorten it.

    The gains use measured times if the step was measured.
    """

    step_ns: float
    parts: tuple[Part, ...]
    ceilings: tuple[Ceiling, ...]
    gains: tuple[Gain, ...]  # the largest first
    utilization: float | None  # see `utilization` below

    @classmethod
    def of(cls, step: StepRecord) -> Ledger:
        """Add up the graphs of one step."""
        spent = Spent.of(step)
        alone_ns = spent.compute_ns - spent.slowed_ns
        idle_ns = max(0.0, spent.device_ns - spent.compute_ns - spent.exposed_ns)
        host_ns = step.host_ns or 0.0
        host_excess_ns = max(0.0, host_ns - spent.device_ns)
        busiest_ns = max(spent.queues_ns.values(), default=0.0)
        parts = (
            *(Part(what, alone_ns * share, kind) for (what, kind), share in compute_shares(step).items()),
            Part("compute slowed by communication", spent.slowed_ns, "slowed"),
            Part("exposed communication", spent.exposed_ns, "idle"),
            Part("gaps between kernels", idle_ns, "gap"),
            Part("waiting for the host", host_excess_ns, "host"),
        )
        hidden_ns = max(spent.compute_ns + idle_ns, busiest_ns, host_ns)
        ceilings = [
            Ceiling("as predicted", step.step_ns),
            Ceiling("lower bound of all orders", step.lower_bound_ns),
            Ceiling("all communication hidden", hidden_ns),
            Ceiling("hidden, and compute not slowed by it", max(alone_ns + idle_ns, busiest_ns, host_ns)),
        ]
        recompute_ns = 0.0 if host_excess_ns else recomputed_ns(step)
        if recompute_ns > _LEAST * step.step_ns:
            ceilings.append(Ceiling("without recomputation", step.step_ns - recompute_ns))
        if host_excess_ns:
            ceilings.append(Ceiling("with a host that is fast enough", spent.device_ns))
        measured = measured_step(step) if exposed_is_measured(step) else None
        # Another order saves at most the distance to the lower bound; faster compute saves at most the distance to the
        # time of the busiest queue.
        by_order_ns = max(0.0, step.step_ns - step.lower_bound_ns)
        candidates = []
        for cause, exposed in _by_cause(step, bool(measured)).items():
            exposed_ns = sum(exposure.exposed_ns for exposure in exposed)
            gain_ns = min(exposed_ns, by_order_ns) if cause in OF_ORDER and measured is None else exposed_ns
            candidates.append(Gain(gain_ns, f"{_graphs(exposed)}: {cause.why}", cause.advice, bool(measured)))
        slowed = "communication slows overlapping compute"
        slowed_ns = min(spent.slowed_ns, max(0.0, step.step_ns - max(busiest_ns, host_ns)))
        candidates.append(Gain(slowed_ns, slowed, 'fewer bytes; options={"transport": "copy"} within a host'))
        recomputes = "backward recomputes what forward computed"
        candidates.append(
            Gain(
                recompute_ns,
                recomputes,
                "fewer activation checkpoints or reshard_after_forward=False, where memory allows",
            )
        )
        more = saved_by_keeping(step)
        if more:
            regathers = f"backward gathers {human_bytes(more[-1][0])} of parameters again"
            candidates.append(Gain(more[-1][1], regathers, f"a larger memory_budget; {savings_text(more)}"))
        if measured is not None:
            candidates.append(Gain(measured.late_ns, "the device waits for the host's next launch", FOR_THE_HOST, True))
        elif host_excess_ns:
            why = spent.limiting_factor()
            candidates = [Gain(host_excess_ns, why.why, why.advice)]  # a shorter device time does not help
        least_ns = _LEAST * (measured or step).step_ns
        gains = sorted((gain for gain in candidates if gain.ns > least_ns), key=lambda gain: -gain.ns)
        shown = tuple(part for part in parts if part.ns > 0)
        return cls(step.step_ns, shown, tuple(ceilings), tuple(gains), utilization(step))


def _by_cause(step: StepRecord, measured: bool) -> dict[Cause, list[Exposure]]:
    by_cause: dict[Cause, list[Exposure]] = defaultdict(list)
    for exposure in exposures(step, measured=measured):
        by_cause[exposure.cause].append(exposure)
    return by_cause


def _graphs(exposed: Sequence[Exposure]) -> str:
    return " and ".join(dict.fromkeys(exposure.graph for exposure in exposed))


_PRODUCTS, _ATTENTION, _CONVOLUTIONS, _GENERATED, _OTHERS = (
    ("matrix products", "extern"),
    ("attention", "attention"),
    ("convolutions", "convolution"),
    ("generated kernels", "kernel"),
    ("other library calls", "library"),
)


def compute_shares(step: StepRecord) -> dict[tuple[str, str], float]:
    """Return (kind of compute, color) -> its fraction of the compute time without contention, largest first; sum 1."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for graph, times in step.called:
        for node in schedule_of(graph).nodes:
            if node.kind in COMPUTE and node.estimate is not None and node.estimate.ns:
                sums[_kind(node)] += times * node.estimate.ns
    whole = sum(sums.values())
    if not whole:
        return {("compute", "extern"): 1.0}
    return {what: ns / whole for what, ns in sorted(sums.items(), key=lambda item: -item[1])}


def _kind(node: Node) -> tuple[str, str]:
    if node.kind is Kind.KERNEL:
        return _GENERATED
    if "attention" in node.op:
        return _ATTENTION
    if "convolution" in node.op:
        return _CONVOLUTIONS
    return _PRODUCTS if node.work is not None and node.work.flops else _OTHERS


def recomputed_ns(step: StepRecord) -> float:
    """Return the time (without contention) of backward's compute nodes all of whose ops are also in the forward."""
    forwards = {graph.number: graph for graph, _ in step.called if is_forward(graph.name)}
    found_ns = 0.0
    for graph, times in step.called:
        forward = forwards.get(graph.number)
        if forward is None or not is_backward(graph.name):
            continue
        known = {op for node in schedule_of(forward).nodes for op in node.origin.fx}
        for node in schedule_of(graph).nodes:
            if (
                node.kind in COMPUTE
                and node.estimate is not None
                and node.origin.fx
                and known.issuperset(node.origin.fx)
            ):
                found_ns += times * node.estimate.ns
    return found_ns


def measured_parts(measured: Measured) -> tuple[Part, ...]:
    """Return the parts of a measured step, as far as a profiler can separate them."""
    unseen = "" if measured.shows_communication else ", and waiting for collectives"
    parts = (
        Part("compute", measured.compute_ns, "extern"),
        Part("exposed communication", measured.exposed_ns, "idle"),
        Part(f"gaps between kernels{unseen}", measured.idle_ns - measured.late_ns, "gap"),
        Part("waiting for the host", measured.late_ns, "host"),
    )
    return tuple(part for part in parts if part.ns > 0)


def beside_compute(measured: Measured) -> list[tuple[str, float]]:
    """Return (name, ns) of each part of a measured step's time in which no compute runs."""
    if measured.shows_communication:
        return [("exposed", measured.exposed_ns), ("idle", measured.idle_ns)]
    return [("idle, or waiting for collectives that the trace does not show", measured.exposed_ns + measured.idle_ns)]


def bars(step: StepRecord, ledger: Ledger) -> list[tuple[str, float, tuple[Part, ...]]]:
    """Return (title, ns, parts) of the measured step, if there is one, then of the predicted step."""
    found = [("predicted", ledger.step_ns, ledger.parts)]
    measured = measured_step(step)
    if measured is not None:
        found.insert(0, ("measured", measured.step_ns, measured_parts(measured)))
    return found


def utilization(step: StepRecord) -> float | None:
    """Return the fraction of a step that its matrix products would take at the profile's rate for their dtype.

    Large products reach that rate. None if the profile does not know the rate of a dtype.
    """
    peak_s = 0.0
    for graph, times in step.called:
        what = f"the device profile of {graph.name}"
        data = documents.from_json(graph.profile, dict[str, Any], what) if graph.profile else None
        profile = None if data is None else profile_from_json(data, what)
        for node in schedule_of(graph).nodes:
            if node.work is None or not node.work.flops or not node.work.dtype:
                continue
            rate = None if profile is None else profile.rate(node.work.dtype)
            if rate is None:
                return None
            peak_s += times * node.work.flops / rate
    return peak_s * 1e9 / step.step_ns if peak_s and step.step_ns else None


def tiles(step: StepRecord, ledger: Ledger) -> list[tuple[str, str, str]]:
    """Return (title, value, remark) of each tile at the top of a page: measured times first, then predictions."""
    found = []
    seen = measured_step(step)
    if step.clock_ns is not None:
        found.append(("step, by the clock", ms(step.clock_ns), "from one optimizer step to the next"))
    if seen is not None:
        beside = ", ".join(f"{what} {ms(ns)}" for what, ns in beside_compute(seen))
        found.append(("step, measured", ms(seen.step_ns), beside))
    found.append(("step, predicted" if found else "step", ms(step.step_ns), f"as traced {ms(step.step_before_ns)}"))
    if step.tokens:
        found.append(("tokens/s", f"{tokens_per_s(step):,.0f}", f"{step.tokens:,} tokens a step on all ranks"))
    exposed_ns = sum(part.ns for part in ledger.parts if part.kind == "idle")
    share = exposed_ns / step.step_ns if step.step_ns else 0.0
    found.append(("exposed communication", ms(exposed_ns), f"{share:.1%} of the step"))
    best = ledger.ceilings[1].ns
    found.append(("lower bound", ms(best), f"gap {step.step_ns / best - 1:.1%}" if best else ""))
    if ledger.utilization is not None:
        found.append(("arithmetic", f"{ledger.utilization:.1%}", "of the profile's rate, recomputation included"))
    budgets = [graph.budget_bytes for graph, _ in step.called if graph.budget_bytes is not None]
    budget = f"budget of the graphs {human_bytes(max(budgets))}" if budgets else ""
    beside = "; ".join(filter(None, (peak_parts(step), budget))) or "no budget"
    found.append(("peak memory", human_bytes(step_peak_bytes(step)), beside))
    return found


def tokens_per_s(step: StepRecord) -> float:
    """Return tokens/s of a step by the host's clock, else by the profiler, else as predicted."""
    return step.tokens / (seen_ns(step) or step.step_ns) * 1e9
