"""What a compiled step did and what is predicted for it: plain data that every renderer reads.

A `GraphRecord` describes one compiled graph (a forward, a backward); a `StepRecord` holds all graphs of one process.
Times are nanoseconds since the graph's first launch, as the simulator predicts them; sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from overlapc.units import MOST_BYTES, MOST_NS

# What a record that comes from elsewhere may say (`record.load`). Differences of times may be a rounding below zero.
Ns = Annotated[float, Meta(ge=-1.0, le=MOST_NS)]
Seconds = Annotated[float, Meta(ge=0, le=MOST_NS / 1e9)]
Share = Annotated[float, Meta(ge=-1e-6, le=1 + 1e-6)]
Count = Annotated[int, Meta(ge=0, le=MOST_BYTES)]  # of bytes, too
Found = Literal["", "graph", "step"]  # what the disk cache had: nothing, the graph, or the whole step that it is of


@dataclass(frozen=True, slots=True)
class Span:
    """One node on one resource. `lane` is "compute" or a queue such as "@dp"."""

    node: str
    lane: str
    start_ns: Ns
    end_ns: Ns
    kind: str  # the node's schedule.Kind as text, or "idle": compute stands still for what `node` waits for
    origin: str = ""  # module path or source line


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One collective: how long it is, and how much of that compute hides before and after the passes."""

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
    limit: str  # why it was not hidden further
    origin: str = ""
    via: str = ""  # what carries it: "" for the library of its process group, "copy" for copies
    causes: tuple[str, ...] = ()  # the names of the `passes.reasons.Reason`s that `limit` puts in words


@dataclass(frozen=True, slots=True)
class PassRow:
    """One pass that ran: how long it took and why it did what it did, by node."""

    name: str
    seconds: Seconds
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """A simulated order: when the last resource is done, and what ran where."""

    step_ns: Ns
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """A graph as it ran: medians over `runs`. Communication includes the time that ranks waited for each other."""

    runs: Count
    step_ns: Ns  # from the first thing launched to the end of the last
    compute_ns: Ns
    comm_ns: Ns
    exposed_ns: Ns  # communication beside which no compute ran, because the next kernel waited for it
    idle_ns: Ns  # the rest of the step, such as gaps between kernels
    nodes: Mapping[str, Ns] = field(default_factory=dict)  # node -> ns
    # node -> the share of its time in which communication (of a collective: compute) ran, too
    beside: Mapping[str, Share] = field(default_factory=dict)
    late_ns: Ns = 0.0  # of the idle time: in which the host had yet to launch the next kernel
    spans: tuple[Span, ...] = ()  # of the run whose step is nearest to the median: what ran where, and when
    exposed: Mapping[str, Ns] = field(default_factory=dict)  # collective -> its part of exposed_ns


@dataclass(frozen=True, slots=True)
class KeptGather:
    """Parameters that forward gathers in one launch and that stay gathered until backward."""

    name: str  # of the launch in forward
    of: str  # the modules given to `fully_shard`
    bytes: Count
    why: str


@dataclass(frozen=True, slots=True)
class RepeatedGather:
    """Parameters that backward gathers again in one launch."""

    name: str  # of the launch in backward
    of: str
    bytes: Count
    saved_ns: Ns  # how much shorter the graph is if these stay gathered until backward, and no others


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One compiled graph."""

    name: str
    schedule: str  # the final schedule in its text format
    before: Plan
    after: Plan
    lower_bound_ns: Ns  # no order of this graph can be faster
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
    attention: Mapping[str, Count] = field(default_factory=dict)  # calls by kernel, sizes and why it is that kernel
    unknown: tuple[str, ...] = ()  # nodes without an estimate; the times above leave them out
    compile_seconds: Seconds = 0.0  # of this process
    found: Found = ""
    captured: str = ""  # with cuda_graphs: how many parts are captured, and what is not and why
    not_copied: Mapping[str, str] = field(default_factory=dict)  # transport=copy: collectives that are not, and why
    pool_bytes: int = 0  # of this rank's memory that is shared for copies
    tuned: str = ""  # with autotune: how many kernels were measured, and what other block sizes gain
    measured: Measured | None = None  # None: not measured
    host_ns: Ns | None = None  # what a call costs the host; None: the profile does not know
    profile: str = ""  # the device profile of these times, as the JSON of its file; "": none was named
    # What the schedule takes otherwise at the clock that the estimates are of; the simulator goes from there.
    full_load_ns: Mapping[str, Ns] = field(default_factory=dict)
    changes_inputs: bool = False  # as a compiled optimizer does
    gap: Mapping[str, Ns] = field(default_factory=dict)  # what it has over the lower bound, by kind of loss
    kept_gathers: tuple[KeptGather, ...] = ()  # of a forward
    repeated_gathers: tuple[RepeatedGather, ...] = ()  # of a backward; those first that save most a byte
    why_repeated: str = ""  # why these do not stay gathered
    # (bytes, ns): with so many bytes of them gathered until backward, how much shorter the graph is.
    saved_by_keeping: tuple[tuple[Count, Ns], ...] = ()
    alone_ns: Ns | None = None  # what its compute takes with no communication beside it; None: an older record

    @property
    def infers(self) -> bool:
        """Whether it is of a forward that no backward follows."""
        return self.name.startswith("inference")

    @property
    def number(self) -> int | None:
        """Which `Capture` it is of; None for a name that is not the backend's."""
        _, _, digits = self.name.rpartition("_")
        return int(digits) if digits.isdecimal() else None

    @property
    def exposed_before_ns(self) -> float:
        """Time that compute stands still for collectives in the incoming order."""
        return sum(row.exposed_before_ns for row in self.collectives)

    @property
    def exposed_after_ns(self) -> float:
        """The same in the final order."""
        return sum(row.exposed_after_ns for row in self.collectives)


@dataclass(frozen=True, slots=True)
class Capture:
    """A function as Dynamo captured it at one time, or a piece of one between two graph breaks."""

    number: Count  # of its graphs: 3 of forward_3 and backward_3
    frame: str  # Dynamo's number of the function or piece, which its other captures have too
    function: str = ""
    source: str = ""  # file:line
    recompiled: str = ""  # the guard of an earlier capture that failed; "" for the first


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A line at which Dynamo could not go on with a graph."""

    source: str  # file:line
    code: str
    reason: str
    times: Count = 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Every graph that one process compiled, in the order of compilation."""

    rank: Count = 0
    world_size: Count = 1
    graphs: tuple[GraphRecord, ...] = ()
    measured_peak_bytes: Count | None = (
        None  # most that torch's allocator gave out while measuring, and pools; None: not a GPU
    )
    calls: Mapping[str, Count] = field(default_factory=dict)  # graph -> in one step; empty: no optimizer has stepped
    steps: Count = 0  # that were seen to end, of which `calls` is typical
    captures: tuple[Capture, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    seconds: Mapping[str, Seconds] = field(default_factory=dict)  # phase of compiling -> how long, of all graphs
    clock_ns: Ns | None = None  # from optimizer to optimizer by the host's clock, the median of the last steps
    tokens: Count = 0  # of a step on all ranks, as the script says (`overlapc.metrics`); 0: it does not
    optimizer_bytes: Mapping[str, Count] = field(default_factory=dict)  # class -> its state; empty: none has stepped
    update_peak_bytes: Count = 0  # most that is live while the optimizers step, as planned; 0: not planned

    @property
    def called(self) -> tuple[tuple[GraphRecord, int], ...]:
        """The graphs that one training step calls, and how often.

        Before an optimizer has stepped, every graph once. Inference is no part of a step that trains, but for what
        changes its inputs, as a compiled optimizer does.
        """
        calls = self.calls or {graph.name: 1 for graph in self.graphs}
        found = [(graph, calls[graph.name]) for graph in self.graphs if calls.get(graph.name)]
        trains = [each for each in found if not each[0].infers or each[0].changes_inputs]
        return tuple(trains if any(not graph.infers for graph, _ in found) else found)

    @property
    def left_out(self) -> tuple[GraphRecord, ...]:
        """The graphs that are no part of a step: inference, other sizes, what only the first step called."""
        names = {graph.name for graph, _ in self.called}
        return tuple(graph for graph in self.graphs if graph.name not in names)

    def sum(self, of: Callable[[GraphRecord], float]) -> float:
        """A quantity of the graphs of one step, added up over its calls."""
        return sum(of(graph) * times for graph, times in self.called)

    @property
    def host_ns(self) -> float | None:
        """The host's time for a step; None unless it is known of each of its graphs."""
        called = self.called
        if not called or any(graph.host_ns is None for graph, _ in called):
            return None
        return self.sum(lambda graph: graph.host_ns or 0.0)

    @property
    def device_ns(self) -> float:
        """The device's time for the graphs of a step, one after the other."""
        return self.sum(lambda graph: graph.after.step_ns)

    @property
    def step_ns(self) -> float:
        """What each of many steps takes: what the slower of device and host does, as the host runs ahead."""
        return max(self.device_ns, self.host_ns or 0.0)

    @property
    def step_before_ns(self) -> float:
        """The same in the incoming order."""
        return max(self.sum(lambda graph: graph.before.step_ns), self.host_ns or 0.0)

    @property
    def lower_bound_ns(self) -> float:
        """What no orders of the graphs can beat."""
        return max(self.sum(lambda graph: graph.lower_bound_ns), self.host_ns or 0.0)


def seen_ns(step: StepRecord) -> float | None:
    """What a step was seen to take: by the clock, with the optimizer and all else, or by the profiler, its graphs."""
    measured = measured_step(step)
    return step.clock_ns or (measured.step_ns if measured is not None else None)


def measured_step(step: StepRecord) -> Measured | None:
    """What the graphs of one step took, added up over its calls; None unless each of them was measured."""
    found = [(graph.measured, times) for graph, times in step.called]
    measured = [(each, times) for each, times in found if each is not None]
    if not measured or len(measured) != len(found):
        return None
    sums = {
        name: sum(getattr(each, name) * times for each, times in measured)
        for name in ("step_ns", "compute_ns", "comm_ns", "exposed_ns", "idle_ns", "late_ns")
    }
    return Measured(runs=min(each.runs for each, _ in measured), **sums)
