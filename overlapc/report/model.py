"""What a compiled step did and expects: plain data that every renderer reads.

A `GraphRecord` describes one compiled graph (a forward, a backward); a `StepRecord` holds all graphs of one process.
Times are nanoseconds since the graph's first launch, as the simulator predicts them; sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """One node on one resource. `lane` is "compute" or a queue such as "@dp"."""

    node: str
    lane: str
    start_ns: float
    end_ns: float
    kind: str  # the node's schedule.Kind as text, or "idle": compute stands still for what `node` waits for
    origin: str = ""  # module path or source line


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One collective: how long it is, and how much of that compute hides before and after the passes."""

    name: str
    op: str
    group: str
    ranks: int
    bytes: int
    estimate_ns: float | None  # None: nobody could estimate it
    source: str
    hidden_before_ns: float
    exposed_before_ns: float
    hidden_after_ns: float
    exposed_after_ns: float
    moves: int
    limit: str  # why it was not hidden further
    origin: str = ""
    via: str = ""  # what carries it: "" for the library of its process group, "copy" for copies
    causes: tuple[str, ...] = ()  # the names of the `passes.reasons.Reason`s that `limit` puts in words


@dataclass(frozen=True, slots=True)
class PassRow:
    """One pass that ran: how long it took and why it did what it did, by node."""

    name: str
    seconds: float
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """A simulated order: when the last resource is done, and what ran where."""

    step_ns: float
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """A graph as it ran: medians over `runs`. Communication includes the time that ranks waited for each other."""

    runs: int
    step_ns: float  # from the first thing launched to the end of the last
    compute_ns: float
    comm_ns: float
    exposed_ns: float  # communication beside which no compute ran, because the next kernel waited for it
    idle_ns: float  # the rest of the step, such as gaps between kernels
    nodes: Mapping[str, float] = field(default_factory=dict)  # node -> ns
    # node -> the share of its time in which communication (of a collective: compute) ran, too
    beside: Mapping[str, float] = field(default_factory=dict)
    late_ns: float = 0.0  # of the idle time: in which the host had yet to launch the next kernel


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One compiled graph."""

    name: str
    schedule: str  # the final schedule in its text format
    before: Plan
    after: Plan
    lower_bound_ns: float  # no order of this graph can be faster
    peak_bytes: int
    incoming_peak_bytes: int  # before the passes
    budget_bytes: int | None = None
    collectives: tuple[CollectiveRow, ...] = ()
    memory: tuple[tuple[float, int], ...] = ()  # (time, live bytes) at every change, in the final order
    passes: tuple[PassRow, ...] = ()
    kernels: int = 0  # generated kernels launched in one run
    externs: int = 0  # library calls
    fallbacks: Mapping[str, int] = field(default_factory=dict)  # ops run eagerly for want of a lowering
    attention: Mapping[str, int] = field(default_factory=dict)  # calls by kernel, sizes and why it is that kernel
    unknown: tuple[str, ...] = ()  # nodes nobody could estimate; the times above leave them out
    compile_seconds: float = 0.0
    captured: str = ""  # with cuda_graphs: how many parts are captured, and what is not and why
    not_copied: Mapping[str, str] = field(default_factory=dict)  # transport=copy: collectives that are not, and why
    pool_bytes: int = 0  # of this rank's memory that is shared for copies
    tuned: str = ""  # with autotune: how many kernels were measured, and what other block sizes gain
    measured: Measured | None = None  # None: nobody measured it
    host_ns: float | None = None  # what a call costs the host; None: the profile does not know
    alone_ns: float | None = None  # what its compute takes with no communication beside it; None: an older record

    @property
    def exposed_before_ns(self) -> float:
        """Time that compute stands still for collectives in the incoming order."""
        return sum(row.exposed_before_ns for row in self.collectives)

    @property
    def exposed_after_ns(self) -> float:
        """The same in the final order."""
        return sum(row.exposed_after_ns for row in self.collectives)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GraphRecord:
        """The record whose `asdict` is `data`."""
        return cls(
            **{
                **data,
                "before": _plan(data["before"]),
                "after": _plan(data["after"]),
                "collectives": tuple(map(_collective, data["collectives"])),
                "memory": tuple((time_ns, size_bytes) for time_ns, size_bytes in data["memory"]),
                "passes": tuple(PassRow(**row) for row in data["passes"]),
                "unknown": tuple(data["unknown"]),
                "measured": Measured(**data["measured"]) if data.get("measured") else None,
            }
        )


def _collective(data: Mapping[str, Any]) -> CollectiveRow:
    return CollectiveRow(**{**data, "causes": tuple(data.get("causes", ()))})


def _plan(data: Mapping[str, Any]) -> Plan:
    return Plan(data["step_ns"], tuple(Span(**span) for span in data["spans"]))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Every graph that one process compiled, in the order of compilation."""

    rank: int = 0
    world_size: int = 1
    graphs: tuple[GraphRecord, ...] = ()
    measured_peak_bytes: int | None = (
        None  # most that torch's allocator gave out while measuring, and pools; None: not a GPU
    )

    @property
    def host_ns(self) -> float | None:
        """The host's time for all graphs; None unless it is known of each."""
        found = [graph.host_ns for graph in self.graphs if graph.host_ns is not None]
        return sum(found) if found and len(found) == len(self.graphs) else None

    @property
    def device_ns(self) -> float:
        """The device's time for all graphs, one after the other."""
        return sum(graph.after.step_ns for graph in self.graphs)

    @property
    def step_ns(self) -> float:
        """What each of many steps takes: what the slower of device and host does, as the host runs ahead."""
        return max(self.device_ns, self.host_ns or 0.0)

    @property
    def step_before_ns(self) -> float:
        """The same in the incoming order."""
        return max(sum(graph.before.step_ns for graph in self.graphs), self.host_ns or 0.0)

    @property
    def lower_bound_ns(self) -> float:
        """What no orders of the graphs can beat."""
        return max(sum(graph.lower_bound_ns for graph in self.graphs), self.host_ns or 0.0)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepRecord:
        """The record whose `asdict` is `data`."""
        graphs = tuple(map(GraphRecord.from_json, data["graphs"]))
        return cls(data["rank"], data["world_size"], graphs, data.get("measured_peak_bytes"))
