"""Parameters stay gathered for backward as far as the memory budget has room, most expensive gathers per byte first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapc.codegen.copies import laid_out_bytes
from overlapc.errors import MemoryBudgetError
from overlapc.passes.base import Context
from overlapc.passes.run import run_pipeline
from overlapc.planning.keep_gathered import Step, kept_gathers
from overlapc.schedule.gathered_inputs import given_gathered
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Buffer
from overlapc.schedule.text import parse
from overlapc.schedule.verify import verify
from overlapc.units import parse_bytes
from tests.graphs import by_copies

LAYERS = 4
NAMES = [f"a{at}" for at in range(LAYERS)]


def step_within(budget: str | None) -> Step:
    """Return a step whose layers compute for 10 us and gather for 40 us; the gather of layer 2 takes 80 us."""
    inputs = [f"p{at} = input : 1MiB" for at in range(LAYERS)]
    forward = ["schedule forward_0", *inputs, "x = input : 1MiB"]
    backward = ["schedule backward_0", *inputs, "d = input : 1MiB"]
    backward += [f"s{at} = input freeable : 1MiB" for at in range(LAYERS)]
    for at in range(LAYERS):
        forward += [*_gathered(at), f"s{at} = extern:mm({f's{at - 1}' if at else 'x'}, w{at}) : 1MiB 10us"]
    for at in reversed(range(LAYERS)):
        given = f"g{at + 1}" if at + 1 < LAYERS else "d"
        backward += [*_gathered(at), f"g{at} = extern:mm({given}, w{at}, s{at}) : 1MiB 10us"]
    forward.append("return " + ", ".join(f"s{at}" for at in range(LAYERS)))
    backward.append("return g0")
    ctx = Context(passes=("raise_collectives", "sink_waits"))
    budget_bytes = None if budget is None else parse_bytes(budget)
    given, taken = (replace(parse("\n".join(lines)), budget_bytes=budget_bytes) for lines in (forward, backward))
    return Step.of((given, ctx), (taken, ctx))


def _gathered(at: int) -> list[str]:
    return [
        f"c{at} = kernel(p{at}) : 1MiB 1us",
        f"a{at} = all_gather(c{at}) @dp(4) unit=layers.{at} : 4MiB {80 if at == 2 else 40}us",
        f"w{at} = wait(a{at})",
    ]


def test_a_kept_parameter_is_an_output_of_forward_and_an_input_of_backward() -> None:
    step = step_within("1GiB")
    kept = step.keeping(["a1", "a3"])
    for schedule in (kept.forward, kept.backward):
        verify(schedule, schedule.name)
    assert kept.forward.outputs == (*step.forward.outputs, "w1", "w3")
    assert [node.name for node in kept.backward.nodes] == ["g3", "c2", "a2", "w2", "g2", "g1", "c0", "a0", "w0", "g0"]
    assert kept.backward.buffers["w3"] == Buffer("w3", 4 * 2**20, is_input=True, freeable=True)
    more = analyze(kept.forward).peak_bytes - analyze(step.forward).peak_bytes
    assert 0 < more <= 2 * 4 * 2**20


def test_gathers_with_the_highest_cost_per_byte_are_kept_first() -> None:
    kept, _ = kept_gathers(step_within("1GiB"), NAMES)
    assert (kept[0], set(kept)) == ("a2", set(NAMES))
    kept, _ = kept_gathers(step_within("1GiB"), ["a0", "a1"])
    assert set(kept) == {"a0", "a1"}


def test_more_budget_never_makes_the_step_longer() -> None:
    steps = [step_within(f"{mib}MiB") for mib in range(20, 48, 2)]
    kept = [kept_gathers(step, NAMES)[0] for step in steps]
    planned_ns = [step.keeping(names).planned_ns for step, names in zip(steps, kept, strict=True)]
    assert planned_ns == sorted(planned_ns, reverse=True)
    assert planned_ns[-1] < 0.8 * planned_ns[0]
    assert [len(names) for names in kept] == sorted(len(names) for names in kept)
    for step, names in zip(steps, kept, strict=True):
        for plan in step.keeping(names).plans:
            assert analyze(plan.schedule).peak_bytes <= plan.schedule.budget_bytes


def test_a_budget_below_what_the_step_needs_is_a_memory_budget_error() -> None:
    with pytest.raises(MemoryBudgetError, match="memory_budget leaves 5MiB"):
        kept_gathers(step_within("5MiB"), NAMES)


def test_forward_leaves_room_beside_its_memory_pool_for_what_backward_needs() -> None:
    step = step_within("24MiB")
    backward = by_copies(step.backward)
    more = Buffer("more", 8 * 2**20, is_input=True)
    backward = replace(backward, buffers={**backward.buffers, "more": more})
    step = replace(step, forward=by_copies(step.forward), backward=backward)
    assert step.beside_pools_bytes == 18 * 2**20
    alone = run_pipeline(step.forward, step.forward_ctx)
    pools = [laid_out_bytes(plan.schedule) // 2**20 for plan in (alone, *step.plans)]
    assert pools == [8, 4, 4], "two gathers at a time in forward alone"
    assert step.plans[1].peak_bytes <= 24 * 2**20
    by_library = replace(step, forward=step_within("24MiB").forward)
    plan, _ = by_library.plans
    assert plan.peak_bytes == analyze(plan.schedule).peak_bytes, "without a pool nothing is shared"


def test_a_schedule_without_its_gathers_needs_no_casts_for_them() -> None:
    backward = given_gathered(step_within("1GiB").backward, set(NAMES))
    assert [node.name for node in backward.nodes] == ["g3", "g2", "g1", "g0"]


def test_fewer_kept_gathers_are_also_planned_and_the_best_plan_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_within("1GiB")
    nothing = len(step.forward.outputs)
    by_count = {0: 9e8, 4: 5e8, 3: 4e8, 2: 6e8}
    monkeypatch.setattr(Step, "planned_ns", property(lambda step: by_count[len(step.forward.outputs) - nothing]))
    assert len(kept_gathers(step, NAMES)[0]) == 3
