"""The limiting factor of a step (host, communication or compute), and the ops that its compute consists of."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from overlapc.report.advice import Cause
from overlapc.report.model import StepRecord
from overlapc.report.parsed_schedules import schedule_of
from overlapc.report.times import ms
from overlapc.schedule.model import Kind

_LITTLE = 0.05  # fraction of a step; less exposed communication than that is not the limiting factor
_GENERATED = "generated kernels"
_NUMBER = re.compile(r"_\d+$")  # the suffix with which FX distinguishes nodes of the same op

FOR_THE_HOST = (
    "more work in each launch (batch, sequence); cuda_graphs=True, for small models; larger groups of"
    " fully_shard; guard_filter_fn=overlapc.trust_modules, for parameters that are DTensors"
)


@dataclass(frozen=True, slots=True)
class ComputeShare:
    """All compute of one kind in a step: calls of one library op, or all generated kernels."""

    what: str
    ns: float
    count: int


def sources(step: StepRecord) -> dict[str, float]:
    """Return the source of estimates -> its fraction of the sum of all estimates, largest first."""
    by_source_ns: dict[str, float] = defaultdict(float)
    for graph, times in step.called:
        for node in schedule_of(graph).nodes:
            if node.estimate is not None and node.estimate.ns:
                by_source_ns[node.estimate.source] += node.estimate.ns * times
    whole_ns = sum(by_source_ns.values())
    return {source: ns / whole_ns for source, ns in sorted(by_source_ns.items(), key=lambda item: -item[1])}


@dataclass(frozen=True, slots=True)
class Spent:
    """The predicted time of a step by resource, summed over its graphs."""

    device_ns: float  # the step time of the device alone
    host_ns: float | None  # the host's time for the step; None: not known
    compute_ns: float  # includes slowed_ns
    slowed_ns: float  # time that contention with communication adds to compute; 0 if not known
    exposed_ns: float  # time that compute waits for communication
    queues_ns: dict[str, float]  # busy time of each queue, longest first
    work: tuple[ComputeShare, ...]  # compute by kind, longest first

    @classmethod
    def of(cls, step: StepRecord) -> Spent:
        """Add up the spans of the final order."""
        lanes: dict[str, float] = defaultdict(float)
        work: dict[str, list[float]] = defaultdict(list)
        alone_known = all(graph.alone_ns is not None for graph, _ in step.called)
        for graph, times in step.called:
            for span in graph.after.spans:
                if span.kind == "idle":
                    continue
                lanes[span.lane] += (span.end_ns - span.start_ns) * times
                if span.lane == "compute":
                    what = _op(span.node) if span.kind == Kind.EXTERN.value else _GENERATED
                    work[what] += [span.end_ns - span.start_ns] * times
        compute_ns = lanes.pop("compute", 0.0)
        return cls(
            step.device_ns,
            step.host_ns,
            compute_ns,
            compute_ns - step.sum(lambda graph: graph.alone_ns or 0.0) if alone_known else 0.0,
            step.sum(lambda graph: graph.exposed_after_ns),
            dict(sorted(lanes.items(), key=lambda item: -item[1])),
            tuple(
                sorted(
                    (ComputeShare(what, sum(each), len(each)) for what, each in work.items()), key=lambda row: -row.ns
                )
            ),
        )

    def limiting_factor(self) -> Cause:
        """Return the resource that must become faster, or be used less, to make the step shorter."""
        queue, busy_ns = next(iter(self.queues_ns.items()), ("", 0.0))
        if self.host_ns is not None and self.host_ns > self.device_ns:
            return Cause(
                f"the host: it needs {ms(self.host_ns)}, the device {ms(self.device_ns)}",
                FOR_THE_HOST,
            )
        if busy_ns > self.compute_ns:
            return Cause(
                f"communication: {queue} takes {ms(busy_ns)}, longer than all compute ({ms(self.compute_ns)})",
                "more compute on each rank (batch, sequence); fewer bytes (mp_policy, reshard_after_forward=False,"
                " overlapc.no_sync); fewer ranks on this mesh axis (HSDP)",
            )
        if self.exposed_ns > _LITTLE * self.device_ns:
            return Cause(f"exposed communication, {self._share(self.exposed_ns)} of the step: see below")
        rest = "communication is hidden except as listed below" if self.queues_ns else "these graphs do not communicate"
        return Cause(f"compute, {self._share(self.compute_ns)} of the step; {rest}")

    def _share(self, ns: float) -> str:
        return f"{100 * ns / self.device_ns:.1f}%" if self.device_ns > 0 else "0%"


def _op(node: str) -> str:
    """Return the library op of a node from its name. Plans for GPUs trace the CPU's attention op, not the GPU's."""
    return _NUMBER.sub("", node).replace("_for_cpu", "")
