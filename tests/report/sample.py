"""A report small enough to check by hand, of two ranks: rank 0 has a forward and a backward, rank 1 a forward."""

from __future__ import annotations

from dataclasses import replace

from overlapc.report.model import CollectiveRow, GraphRecord, PassRow, Plan, Span, StepRecord
from overlapc.report.record import Report

# ag0 and ag1 take 100 µs each, mm0 and mm1 80 µs. Before: every gather is waited for as soon as it has started.
BEFORE = Plan(
    360_000.0,
    (
        Span("ag0", "@dp", 0.0, 100_000.0, "start"),
        Span("ag0", "compute", 0.0, 100_000.0, "idle"),
        Span("mm0", "compute", 100_000.0, 180_000.0, "extern", "layers.0"),
        Span("ag1", "@dp", 180_000.0, 280_000.0, "start"),
        Span("ag1", "compute", 180_000.0, 280_000.0, "idle"),
        Span("mm1", "compute", 280_000.0, 360_000.0, "kernel"),
    ),
)
# After: ag1 overlaps mm0, and its last 20 µs are exposed.
AFTER = Plan(
    280_000.0,
    (
        Span("ag0", "@dp", 0.0, 100_000.0, "start"),
        Span("ag0", "compute", 0.0, 100_000.0, "idle"),
        Span("ag1", "@dp", 100_000.0, 200_000.0, "start"),
        Span("mm0", "compute", 100_000.0, 180_000.0, "extern", "layers.0"),
        Span("ag1", "compute", 180_000.0, 200_000.0, "idle"),
        Span("mm1", "compute", 200_000.0, 280_000.0, "kernel"),
    ),
)
FORWARD = GraphRecord(
    name="forward",
    schedule="schedule forward\nag0 = all_gather(%p0) @dp(2) : 1MiB 100us [table <x>]\n",
    before=BEFORE,
    after=AFTER,
    lower_bound_ns=260_000.0,
    peak_bytes=3 * 2**20,
    incoming_peak_bytes=2 * 2**20,
    budget_bytes=4 * 2**20,
    collectives=(
        CollectiveRow(
            "ag0",
            "all_gather",
            "dp",
            2,
            2**20,
            1e5,
            "table x",
            0.0,
            1e5,
            0.0,
            1e5,
            0,
            "start of schedule",
            causes=("SCHEDULE_START",),
        ),
        CollectiveRow(
            "ag1",
            "all_gather",
            "dp",
            2,
            2**20,
            1e5,
            "table x",
            0.0,
            1e5,
            8e4,
            2e4,
            2,
            "peak memory",
            "layers.1",
            causes=("MEMORY",),
        ),
    ),
    memory=((0.0, 2**20), (100_000.0, 3 * 2**20), (280_000.0, 2**20)),
    memory_before=((0.0, 2**20), (100_000.0, 2 * 2**20), (280_000.0, 2**20)),
    passes=(PassRow("raise_collectives", 0.002, {"ag1": "%mm0 covers it"}),),
    kernels=1,
    externs=1,
    fallbacks={"aten.sort": 1, "aten.topk": 2},
    unknown=("strange",),
    compile_seconds=1.5,
)
BACKWARD = replace(FORWARD, name="backward", collectives=(), fallbacks={}, unknown=(), passes=(), budget_bytes=None)
REPORT = Report((StepRecord(0, 2, (FORWARD, BACKWARD)), StepRecord(1, 2, (FORWARD,))))
