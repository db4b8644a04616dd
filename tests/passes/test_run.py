"""Plans within a memory budget: more of it, or more effort, never leads to a longer step."""

import random
from dataclasses import replace

import pytest

from overlapc.passes.base import Context
from overlapc.passes.pipeline import ORDER
from overlapc.passes.run import run_pipeline
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Schedule
from overlapc.schedule.text import parse
from tests.graphs import order_of

CTX = Context(reorder_collectives=True, overlap_margin=1.5, effort=100)


def small_step(seed: int) -> Schedule:
    """Four layers of a gather, two kernels and a reduction, of random sizes and times."""
    rng = random.Random(seed)
    lines, last = [], "x"

    def cost(most_bytes: int, most_us: int) -> str:
        return f"{rng.randint(1, most_bytes)}B {rng.randint(5, most_us)}us"

    for layer in range(4):
        lines += [
            f"a{layer} = all_gather(p{layer}) @dp : {cost(8, 60)}; w{layer} = wait(a{layer})",
            f"k{layer} = kernel({last}, w{layer}) : {cost(8, 40)}",
            f"g{layer} = kernel(k{layer}, w{layer}) : {cost(8, 40)}",
            f"r{layer} = reduce_scatter(g{layer}) @dp : {cost(4, 60)}; s{layer} = wait(r{layer})",
        ]
        last = f"k{layer}"
    return parse("\n".join(lines))


@pytest.mark.parametrize("seed", [4, 5, 7])
def test_no_step_is_longer_with_a_larger_budget(seed):
    """Planned for just its budget, each of these is longer with a larger one, or than without any."""
    schedule = small_step(seed)
    peak_bytes = analyze(schedule).peak_bytes
    steps_ns = [run_pipeline(schedule, CTX).after.step_ns]
    for share in (1.25, 1.4, 1.5, 2, 2.5, 4):
        budget_bytes = int(share * peak_bytes)
        result = run_pipeline(schedule, replace(CTX, budget_bytes=budget_bytes))
        assert analyze(result.schedule).peak_bytes <= budget_bytes
        steps_ns.append(result.after.step_ns)
    assert steps_ns == sorted(steps_ns, reverse=True)
    assert steps_ns[-1] < steps_ns[0]


@pytest.mark.parametrize("seed", [10, 22])
def test_no_step_is_longer_with_more_effort(seed):
    """Once a search has hidden what memory kept exposed, larger limits may still lead to a shorter step."""
    schedule = small_step(seed)
    ctx = replace(CTX, budget_bytes=int(2.5 * analyze(schedule).peak_bytes))
    steps_ns = [run_pipeline(schedule, replace(ctx, effort=effort)).after.step_ns for effort in (0, 25, 100, 400)]
    assert steps_ns == sorted(steps_ns, reverse=True)


def test_what_is_dumped_and_stopped_within_a_budget_is_the_plan_that_is_taken():
    schedule = small_step(4)
    ctx = replace(CTX, budget_bytes=2 * analyze(schedule).peak_bytes)
    taken, dumped = run_pipeline(schedule, ctx), {}
    again = run_pipeline(schedule, replace(ctx, dump=dumped.__setitem__))
    assert len(dumped) == 2 * len(ORDER)
    assert dumped[f"{len(ORDER):02}_{ORDER[-1]}.after"] == str(taken.ordered) == str(again.ordered)
    stopped = run_pipeline(schedule, replace(ctx, stop_after=ORDER[-1]))
    assert order_of(stopped.schedule) == order_of(taken.schedule)
