"""The record of a compiled step and of its predicted and measured times: plain data that every renderer reads.

A `GraphRecord` describes one compiled graph (a forward, a backward); a `StepRecord` holds all graphs of one process.
Times are nanoseconds since the graph's first launch, as the simulator predicts them; sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from overlapc.graph_names import INFERENCE, kind_of, number_of
from overlapc.units import MOST_BYTES, MOST_NS

# Limits that `record.load` checks. Differences of times may be below zero by a rounding error.
Ns = Annotated[float, Meta(ge=-1.0, le=MOST_NS)]
Seconds = Annotated[float, Meta(ge=0, le=MOST_NS / 1e9)]
Share = Annotated[float, Meta(ge=-1e-6, le=1 + 1e-6)]
Count = Annotated[int, Meta(ge=0, le=MOST_BYTES)]  # also for bytes
# What a span shows: a node, by its schedule.Kind as text, or "idle": compute waits for the collective `node`.
KINDS = ("kernel", "extern", "start", "comm", "idle", "wait", "view", "noop")
SpanKind = Annotated[str, Meta(pattern=f"^({'|'.join(KINDS)})$")]
Found = Literal["", "graph", "step"]  # what was in the disk cache: nothing, the graph, or the whole step around it


@dataclass(frozen=True, slots=True)
class Span:
    """The time that one node takes on one resource. `lane` is "compute" or a queue such as "@dp"."""

    node: str
    lane: str
    start_ns: Ns
    end_ns: Ns
    kind: SpanKind
    origin: str = ""  # module path or source line


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One collective: its time, and how much of it is hidden and exposed before and after the passes."""

    name: str
    op: str
    group: str
    ranks: Count
    bytes: Count
    estimate_ns: Ns | None  # None: no estimate
    source: str
    hidden_before_ns: Ns
    exposed_before_ns: Ns
    hidden_after_ns: Ns
    exposed_after_ns: Ns
    moves: Count
    limit: str  # why passes did not hide more of it
    origin: str = ""
    via: str = ""  # transport: "" for the library of its process group, "copy" for copies
    causes: tuple[str, ...] = ()  # the names of the `passes.reasons.Reason`s that `limit` explains in words


@dataclass(frozen=True, slots=True)
class PassRow:
    """One pass that ran: its duration and the reasons for its decisions, by node."""

    name: str
    seconds: Seconds
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """A simulated order: the time at which the last resource finishes, and the span of each node."""

    step_ns: Ns
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured times of a graph: medians over `runs`. Communication includes waiting for other ranks."""

    runs: Count
    step_ns: Ns  # from the start of the first launched work to the end of the last
    compute_ns: Ns
    comm_ns: Ns
    exposed_ns: Ns  # communication that no compute overlapped, because the next kernel waited for it
    idle_ns: Ns  # the remaining time of the step, such as gaps between kernels
    nodes: Mapping[str, Ns] = field(default_factory=dict)  # node -> ns
    # node -> fraction of its time in which communication (for a collective: compute) ran at the same time
    beside: Mapping[str, Share] = field(default_factory=dict)
    late_ns: Ns = 0.0  # the part of idle_ns in which the host had not launched the next kernel yet
    spans: tuple[Span, ...] = ()  # of the run whose step time is nearest to the median
    exposed: Mapping[str, Ns] = field(default_factory=dict)  # collective -> its part of exposed_ns
    # Whether the trace shows every collective. Otherwise comm_ns and exposed_ns lack some, and idle_ns has their time.
    shows_communication: bool = True


@dataclass(frozen=True, slots=True)
class KeptGather:
    """Parameters that forward gathers in one launch and that stay gathered until backward."""

    name: str  # name of the launch in forward
    of: str  # the modules given to `fully_shard`
    bytes: Count
    why: str


@dataclass(frozen=True, slots=True)
class RepeatedGather:
    """Parameters that backward gathers again in one launch."""

    name: str  # name of the launch in backward
    of: str
    bytes: Count
    saved_ns: Ns  # how much shorter the graph is if only these parameters stay gathered until backward


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """The record of one compiled graph."""

    name: str
    schedule: str  # the final schedule in its text format
    before: Plan
    after: Plan
    lower_bound_ns: Ns  # no order of this graph's nodes can be faster
    peak_bytes: Count
    incoming_peak_bytes: Count  # before the passes
    budget_bytes: Count | None = None
    collectives: tuple[CollectiveRow, ...] = ()
    memory: tuple[tuple[Ns, Count], ...] = ()  # (time, live bytes) at every change, in the final order
    memory_before: tuple[tuple[Ns, Count], ...] = ()  # the same in the incoming order
    passes: tuple[PassRow, ...] = ()
    kernels: Count = 0  # generated kernels launched in one run
    externs: Count = 0  # library calls
    fallbacks: Mapping[str, Count] = field(default_factory=dict)  # ops run eagerly without a lowering
    attention: Mapping[str, Count] = field(default_factory=dict)  # calls by kernel, sizes and reason for that kernel
    unknown: tuple[str, ...] = ()  # nodes without an estimate; the times above leave them out
    compile_seconds: Seconds = 0.0  # time that this process spent to compile or load it
    found: Found = ""
    captured: str = ""  # with cuda_graphs: number of captured parts, and which nodes are not captured and why
    not_copied: Mapping[str, str] = field(default_factory=dict)  # transport=copy: collectives without it -> reason
    pool_bytes: int = 0  # this rank's memory that is shared for copies
    tuned: str = ""  # with autotune: number of measured kernels, and the time saved by other block sizes
    measured: Measured | None = None  # None: not measured
    host_ns: Ns | None = None  # the host's time for one call; None: the profile does not know
    profile: str = ""  # the device profile of these times, as the JSON of its file; "": none was named
    # Estimates at full load of the nodes whose estimate in `schedule` differs because of the simulated clock.
    full_load_ns: Mapping[str, Ns] = field(default_factory=dict)
    changes_inputs: bool = False  # True for a compiled optimizer, for example
    gap: Mapping[str, Ns] = field(default_factory=dict)  # time above the lower bound, by cause
    kept_gathers: tuple[KeptGather, ...] = ()  # of a forward
    repeated_gathers: tuple[RepeatedGather, ...] = ()  # of a backward; by time saved per byte, largest first
    why_repeated: str = ""  # why these parameters do not stay gathered
    # (bytes, ns): how much shorter the graph is if that many bytes of them stay gathered until backward.
    saved_by_keeping: tuple[tuple[Count, Ns], ...] = ()
    alone_ns: Ns | None = None  # compute time without contention from communication; None: an older record

    @property
    def infers(self) -> bool:
        """Whether the graph is a forward without a backward."""
        return kind_of(self.name) == INFERENCE

    @property
    def number(self) -> int | None:
        """The number of the graph's `Capture`; None if the name was not given by the backend."""
        return number_of(self.name)

    @property
    def exposed_before_ns(self) -> float:
        """Time that compute waits for collectives in the incoming order."""
        return sum(row.exposed_before_ns for row in self.collectives)

    @property
    def exposed_after_ns(self) -> float:
        """Time that compute waits for collectives in the final order."""
        return sum(row.exposed_after_ns for row in self.collectives)


@dataclass(frozen=True, slots=True)
class Capture:
    """One capture by Dynamo of a function, or of a piece of it between two graph breaks."""

    number: Count  # the number of its graphs: 3 for forward_3 and backward_3
    frame: str  # Dynamo's number of the function or piece, the same for all of its captures
    function: str = ""
    source: str = ""  # file:line
    recompiled: str = ""  # the guard of an earlier capture that failed; "" for the first


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A line at which Dynamo broke the graph."""

    source: str  # file:line
    code: str
    reason: str
    times: Count = 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """All graphs that one process compiled, in the order of compilation."""

    rank: Count = 0
    world_size: Count = 1
    graphs: tuple[GraphRecord, ...] = ()
    measured_peak_bytes: Count | None = (
        None  # peak of torch's allocator while measuring, plus the pools for copies; None: not measured on a GPU
    )
    calls: Mapping[str, Count] = field(default_factory=dict)  # graph -> calls in a step; empty: no optimizer step yet
    steps: Count = 0  # number of observed steps, from which `calls` is taken
    captures: tuple[Capture, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    seconds: Mapping[str, Seconds] = field(default_factory=dict)  # phase of compilation -> time for all graphs
    clock_ns: Ns | None = None  # from one optimizer step to the next by the host's clock, median of the last steps
    tokens: Count = 0  # tokens of a step on all ranks, as given to `overlapc.metrics`; 0: not given
    optimizer_bytes: Mapping[str, Count] = field(default_factory=dict)  # class -> its state; empty: none has stepped
    update_peak_bytes: Count = 0  # planned peak memory while the optimizers step; 0: not planned

    @property
    def called(self) -> tuple[tuple[GraphRecord, int], ...]:
        """The graphs that one training step calls, with the number of calls.

        Before an optimizer has stepped, every graph counts once. Inference graphs are not part of a training step,
        except those that change their inputs, such as a compiled optimizer.
        """
        calls = self.calls or {graph.name: 1 for graph in self.graphs}
        found = [(graph, calls[graph.name]) for graph in self.graphs if calls.get(graph.name)]
        trains = [each for each in found if not each[0].infers or each[0].changes_inputs]
        return tuple(trains if any(not graph.infers for graph, _ in found) else found)

    @property
    def left_out(self) -> tuple[GraphRecord, ...]:
        """The graphs that are not part of a step: inference, other sizes, graphs that only the first step called."""
        names = {graph.name for graph, _ in self.called}
        return tuple(graph for graph in self.graphs if graph.name not in names)

    def sum(self, of: Callable[[GraphRecord], float]) -> float:
        """Return a quantity of the graphs of one step, summed over its calls."""
        return sum(of(graph) * times for graph, times in self.called)

    @property
    def host_ns(self) -> float | None:
        """The host's time for a step; None unless it is known for each of its graphs."""
        called = self.called
        if not called or any(graph.host_ns is None for graph, _ in called):
            return None
        return self.sum(lambda graph: graph.host_ns or 0.0)

    @property
    def device_ns(self) -> float:
        """The device's time for the graphs of a step, which run one after the other."""
        return self.sum(lambda graph: graph.after.step_ns)

    @property
    def step_ns(self) -> float:
        """Time per step over many steps: that of the slower of device and host, because the host runs ahead."""
        return max(self.device_ns, self.host_ns or 0.0)

    @property
    def step_before_ns(self) -> float:
        """Time per step in the incoming order."""
        return max(self.sum(lambda graph: graph.before.step_ns), self.host_ns or 0.0)

    @property
    def lower_bound_ns(self) -> float:
        """Lower bound of the time per step over all orders of each graph's nodes."""
        return max(self.sum(lambda graph: graph.lower_bound_ns), self.host_ns or 0.0)


def seen_ns(step: StepRecord) -> float | None:
    """Return the measured time of a step: by the clock, which includes the optimizer, else of its graphs; else None."""
    measured = measured_step(step)
    return step.clock_ns or (measured.step_ns if measured is not None else None)


def measured_step(step: StepRecord) -> Measured | None:
    """Return the measured times of a step, summed over its calls; None unless every graph of it was measured."""
    found = [(graph.measured, times) for graph, times in step.called]
    measured = [(each, times) for each, times in found if each is not None]
    if not measured or len(measured) != len(found):
        return None
    sums = {
        name: sum(getattr(each, name) * times for each, times in measured)
        for name in ("step_ns", "compute_ns", "comm_ns", "exposed_ns", "idle_ns", "late_ns")
    }
    seen = all(each.shows_communication for each, _ in measured)
    return Measured(runs=min(each.runs for each, _ in measured), **sums, shows_communication=seen)
