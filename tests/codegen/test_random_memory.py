"""In random programs, fused and ordered in any way, no memory is read after it was reused, overwritten or freed."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import overlapc.codegen.cpp  # noqa: F401 (registers the generator)
from overlapc.codegen import program_builder
from overlapc.codegen.arena import in_arena, peak_bytes
from overlapc.codegen.program import Program
from overlapc.codegen.program_builder import build_program
from overlapc.codegen.sources import Sources, generate_kernels
from overlapc.fusion import fuse_ops
from overlapc.fusion.to_schedule import to_schedule
from overlapc.ir.ops import LoweredGraph
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Schedule
from tests.codegen.memory_machine import Machine
from tests.fusion.programs import Step, capture, inputs, program, steps
from tests.graphs import reordered


def check(made: Program, schedule: Schedule, graph: LoweredGraph) -> int:
    """Assert the rules of memory use for a program, and that its peak is as computed; return the peak in bytes."""
    machine = Machine(made, graph)
    machine.run()
    assert machine.peak_bytes == peak_bytes(made, schedule, graph.hint)
    return machine.peak_bytes


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(steps(), st.booleans(), st.data())
def test_memory_has_the_content_that_is_read_in_any_order_of_any_program(
    recipe: list[Step], fused: bool, data: st.DataObject
):
    graph = capture(program(recipe), *inputs())
    ops, _ = fuse_ops(graph, enabled=fused)
    changed = {graph.root(view.buffer) for op in ops for view in getattr(op, "mutates", ())}
    donated = [name for name in graph.inputs if name not in changed and data.draw(st.booleans())]
    schedule = data.draw(reordered(to_schedule(ops, graph, donated)))
    with patch.object(program_builder, "SMALLEST_REUSED", 0):
        made = build_program(schedule, graph, generate_kernels(schedule, Sources(graph)), donated=donated)
    assert check(made, schedule, graph) <= analyze(schedule).peak_bytes
    check(in_arena(made), schedule, graph)
