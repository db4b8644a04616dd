"""The timeline of a report as a Perfetto trace (https://ui.perfetto.dev opens it), in Perfetto's own protobuf format.

Each rank has a track group for each order: as traced, after the passes, as measured. A group has tracks for the graphs
of a step, compute and every queue, and live memory as a counter. An arrow leads from each collective to the compute
stream's wait for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from types import MappingProxyType
from typing import Any

from overlapc.errors import ConfigError
from overlapc.report.model import KINDS, StepRecord
from overlapc.report.page_data import Data, page_data

Bar = list[Any]  # lane, kind, begin and end in ns, graph/node

_SEQUENCE = 1  # Perfetto's id of the writer; all packets have the same writer
_TITLES = {"before": "before the passes", "after": "after the passes", "measured": "measured"}


def render(steps: Sequence[StepRecord]) -> bytes:
    """Return the bytes of a trace: one step of every rank, all orders starting at time 0.

    Raise ConfigError if the package perfetto is missing.
    """
    try:
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder
    except ImportError:
        raise ConfigError("a .pftrace needs the package perfetto: pip install perfetto") from None
    writer = _Writer(TraceProtoBuilder())
    ranks = page_data(steps)["ranks"]
    for rank in ranks:
        data = rank["data"] if rank["same"] is None else ranks[rank["same"]]["data"]
        top = writer.track(f"rank {rank['rank']}")
        for name in sorted(data["orders"], key=list(_TITLES).index):
            _order(writer, writer.track(_TITLES[name], top), data["orders"][name], data["nodes"])
    return writer.serialize()


def _order(writer: _Writer, parent: int, order: Data, nodes: Data) -> None:
    graphs = writer.track("graphs", parent)
    for (begin, name), (end, _) in pairwise((*order["borders"], (order["end"], ""))):
        writer.slice(graphs, begin, end, name)
    rows = []  # Perfetto groups tracks of the same name, and draws each in its own row
    for lane, title in enumerate(order["lanes"]):
        on_lane = [span for span in order["spans"] if span[0] == lane]
        rows += [(writer.track(title, parent), spans) for spans in levels(on_lane)]
    arrows = [(writer.flow(), *arrow) for arrow in waits(order["spans"])]
    leaving = {tuple(flight): flow for flow, flight, _ in arrows}
    arriving = {tuple(idle): flow for flow, _, idle in arrows}
    for track, spans in reversed(rows):  # queues first: of events at the same time, an arrow's begin must come first
        for span in spans:
            _, kind, begin, end, node = span
            name = node.partition("/")[2]
            if KINDS[kind] == "idle":
                writer.slice(track, begin, end, f"waits for {name}", arrives=arriving.get(tuple(span)))
            else:
                writer.slice(track, begin, end, name, nodes.get(node, {}), leaves=leaving.get(tuple(span)))
    if "memory" in order:
        writer.counter("live memory", parent, order["memory"])


def waits(spans: Iterable[Bar]) -> Iterator[tuple[Bar, Bar]]:
    """Yield (span of a collective, span of compute's wait for it) for each collective that compute waits for."""
    flying: dict[str, Bar] = {}
    for span in sorted(spans, key=lambda span: (span[2], KINDS[span[1]] == "idle")):
        if KINDS[span[1]] != "idle":
            flying[span[4]] = span
        elif span[4] in flying:
            yield flying[span[4]], span


def levels(spans: Iterable[Bar]) -> list[list[Bar]]:
    """Distribute spans over the fewest rows in which they do not overlap, because slices of a track must nest."""
    rows: list[list[Bar]] = []
    free: list[tuple[int, int]] = []  # when a row ends, and which
    for span in sorted(spans, key=lambda span: span[2:4]):
        if free and free[0][0] <= span[2]:
            _, row = heapq.heappop(free)
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(span)
        heapq.heappush(free, (span[3], row))
    return rows


class _Writer:
    """Writes tracks, slices and counters as packets of a trace."""

    def __init__(self, builder: Any) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2

        self._builder = builder
        self._event = perfetto_trace_pb2.TrackEvent
        self._descriptor = perfetto_trace_pb2.TrackDescriptor
        self._unit_size_bytes = perfetto_trace_pb2.CounterDescriptor.UNIT_SIZE_BYTES
        self._tracks, self._flows = count(1), count(1)

    def serialize(self) -> bytes:
        """Return the bytes of the whole trace."""
        return self._builder.serialize()

    def track(self, name: str, parent: int = 0) -> int:
        """Add a track below the earlier tracks of its parent; return its number."""
        descriptor = self._builder.add_packet().track_descriptor
        descriptor.uuid = next(self._tracks)
        descriptor.name = name
        descriptor.child_ordering = self._descriptor.EXPLICIT
        descriptor.sibling_order_rank = descriptor.uuid
        if parent:
            descriptor.parent_uuid = parent
        return descriptor.uuid

    def flow(self) -> int:
        """Return the number of a new arrow."""
        return next(self._flows)

    def slice(
        self,
        track: int,
        begin_ns: int,
        end_ns: int,
        name: str,
        facts: Mapping[str, str] = MappingProxyType({}),
        *,
        leaves: int | None = None,
        arrives: int | None = None,
    ) -> None:
        """Add a bar, with the facts that a click on it shows.

        leaves, arrives: the number of the arrow that starts, or ends, at this bar.
        """
        begin = self._track_event(track, begin_ns, self._event.TYPE_SLICE_BEGIN)
        begin.name = name
        for key, value in facts.items():
            begin.debug_annotations.add(name=key, string_value=value)
        if leaves is not None:
            begin.flow_ids.append(leaves)
        if arrives is not None:
            begin.terminating_flow_ids.append(arrives)
        self._track_event(track, end_ns, self._event.TYPE_SLICE_END)

    def counter(self, name: str, parent: int, points: Iterable[tuple[int, int]]) -> None:
        """Add a counter track of bytes over time."""
        track = self.track(name, parent)
        self._builder.trace.packet[-1].track_descriptor.counter.unit = self._unit_size_bytes
        for at_ns, value in points:
            self._track_event(track, at_ns, self._event.TYPE_COUNTER).counter_value = value

    def _track_event(self, track: int, at_ns: int, kind: int) -> Any:
        packet = self._builder.add_packet()
        packet.timestamp = max(0, at_ns)  # a difference of times may be below zero by a rounding error
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet.track_event
