"""Schedules for tests of buckets, and a profile in which every collective takes at least 10 us."""

from dataclasses import replace

from hypothesis import strategies as st

from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context, Pass
from overlapc.passes.bucket import bucket
from overlapc.schedule.model import Schedule
from overlapc.schedule.text import parse
from overlapc.schedule.verify import verify
from tests.graphs import order_of, schedules

FLOOR = DeviceProfile("floor", collective_floor_ns=10e3)
ROOMY = Context(profile=FLOOR, reorder_collectives=True, budget_bytes=1000)


LAYER = """
    warm = kernel(x) : 0B 900us
    c = kernel(p) : 0B 1us; a = all_gather(c) @dp(2) dtype=bf16 unit=m : 8B 30us; u = wait(a)
    y = kernel(u, warm) : 0B 5us
    d = kernel(q) : 0B 1us; b = all_gather(d) @dp(2) dtype=bf16 unit=m : 8B 30us; v = wait(b)
    z = kernel(v, y) : 0B 5us
"""

BACKWARD = """
    warm = kernel(x) : 0B 900us
    a = all_gather(p) @dp unit=m : 8B 30us; u = wait(a); g = kernel(u) : 8B 50us
    r = reduce_scatter(g) @dp unit=m : 4B 30us; s = wait(r)
    b = all_gather(q) @dp unit=m : 8B 30us; v = wait(b); h = kernel(v) : 8B 50us
    t = reduce_scatter(h) @dp unit=m : 4B 30us; w = wait(t); last = kernel(h) : 0B 900us; return s, w
"""


def bucketed(text: str, run: Pass = bucket, **context: object) -> tuple[Schedule, dict[str, str]]:
    schedule = parse(text)
    ctx = replace(ROOMY, **context)
    moved, report = run(schedule, ctx)
    verify(
        moved, "test", reference=schedule, merged=report.merged, limit_bytes=ctx.limit_bytes(schedule),
        may_reorder_collectives=ctx.reorder_collectives,
    )  # fmt: skip
    assert simulate(moved, ctx.profile).step_ns <= simulate(schedule, ctx.profile).step_ns * (1 + 1e-9)
    assert set(report.limits) <= set(report.reasons) <= set(order_of(moved))
    return moved, report.reasons


def units(each_us: float, count: int = 4) -> str:
    """Return the text of `count` modules, each with one gather and one kernel."""
    gathers = [f"a{at} = all_gather(p{at}) @dp unit=m{at} : 8B {each_us}us" for at in range(count)]
    uses = [f"w{at} = wait(a{at}); k{at} = kernel(w{at}) : 0B 1us" for at in range(count)]
    return ";".join(gathers + uses)


def passes_of(*units: tuple[int, int], reductions: bool = False) -> str:
    """Return the text of a module of two collectives for each (us per collective, us of compute before the next
    module)."""
    lines, ready = [], []
    for at, (each_us, compute_us) in enumerate(units):
        names = (f"a{at}", f"b{at}")
        starts = [f"{name} = {{}}(p) @dp unit=m{at} : 0B {each_us}us" for name in names]
        waits = [f"w{name} = wait({name})" for name in names]
        kernel = f"k{at} = kernel({'x' if reductions else ', '.join(f'w{name}' for name in names)}) : 0B {compute_us}us"
        lines += [*starts, kernel] if reductions else starts
        ready += waits if reductions else [*waits, kernel]
    return "; ".join([*lines, *ready]).format(*["reduce_scatter" if reductions else "all_gather"] * (2 * len(units)))


@st.composite
def with_units(draw: st.DrawFn) -> Schedule:
    """Draw schedules whose collectives belong to one of two modules or to none."""
    schedule = draw(schedules(most_nodes=20))
    unit = st.sampled_from(["m", "m", "n", ""])
    return replace(
        schedule,
        nodes=tuple(
            replace(node, comm=replace(node.comm, unit=draw(unit))) if node.comm is not None else node
            for node in schedule.nodes
        ),
    )
