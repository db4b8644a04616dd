"""The default passes' order of small random steps compared with the optimum, which a constraint solver finds."""

import random

import pytest

pytest.importorskip("ortools", reason="the exact optimum needs ortools (pip install ortools)")

from overlapc.config import Config
from overlapc.passes.base import Context
from overlapc.passes.run import run_pipeline
from overlapc.schedule.model import Schedule
from overlapc.schedule.text import parse
from tests.estimators.simulator.exact import optimum

# The solver's model has neither a memory limit nor buckets.
CTX = Context(reorder_collectives=True, peak_increase=100.0, cache_dir=Config().cache_dir)
PASSES = ("plan_overlap", "raise_under_memory", "sink_under_memory", "sink_waits", "refine")


def small_step(seed: int) -> Schedule:
    """Return a step of kernels and collectives of 1 to 20us on two queues, in some valid order."""
    rng = random.Random(seed)
    lines, values = [], ["x"]
    for kind in rng.sample(["kernel"] * rng.randint(4, 7) + ["collective"] * rng.randint(2, 4), k=6):
        number, us = len(lines), rng.randint(1, 20)
        reads = ", ".join(dict.fromkeys(rng.choice(values[-4:]) for _ in range(rng.randint(1, 2))))
        if kind == "kernel":
            lines.append(f"k{number} = kernel({reads}) : 0B {us}us")
            values.append(f"k{number}")
        else:
            lines.append(f"c{number} = all_gather({values[-1]}) @{rng.choice(('dp', 'tp'))} : 0B {us}us")
            lines.append(f"w{number} = wait(c{number})")
            values.append(f"w{number}")
    lines += [f"k{len(lines) + at} = kernel({rng.choice(values)}) : 0B {rng.randint(1, 20)}us" for at in range(4)]
    return parse("\n".join(lines))


def share_over_the_optimum(seed: int) -> float:
    schedule = small_step(seed)
    best_ns, _ = optimum(schedule)
    step_ns = run_pipeline(schedule, Context(**{**vars(CTX), "passes": PASSES})).after.step_ns
    assert step_ns >= best_ns
    return step_ns / best_ns - 1


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_small_steps_are_near_the_best_order_there_is(count):
    over = [share_over_the_optimum(seed) for seed in range(count)]
    assert sum(over) / count <= 0.005
    assert max(over) <= 0.1
