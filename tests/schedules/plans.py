"""What the default passes make of the corpus, short enough to be read in a diff.

python tests/schedules/plans.py          # writes <case>.plan beside every <case>.sched: look at `git diff`
"""

from __future__ import annotations

from pathlib import Path

from overlapc.config import Config
from overlapc.estimators.from_profile import from_profile
from overlapc.estimators.profiles.profile_file import load_profile
from overlapc.passes.base import Context
from overlapc.passes.run import Result, run_pipeline
from overlapc.planning.pass_context import context_of
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import COMPUTE, Schedule
from overlapc.schedule.text import parse
from overlapc.units import human_bytes

HERE = Path(__file__).parent
CORPUS = sorted(HERE.glob("*.sched"))


def context() -> Context:
    """The default configuration on H200s."""
    profile = load_profile("h200-nvlink")
    return context_of(Config(), profile, from_profile(profile))


def planned(path: Path) -> Result:
    """One schedule of the corpus, estimated as today's profile says, through the default passes."""
    ctx = context()
    assert ctx.estimate is not None
    schedule = parse(path.read_text())
    return run_pipeline(schedule.with_estimates({node.name: ctx.estimate(node) for node in schedule.nodes}), ctx)


def plan_text(result: Result) -> str:
    """Step, exposed time and peak before and after, and where each collective starts and is waited for."""
    before, after = result.before, result.after
    lines = [
        f"{'':8}{'step ms':>9}{'exposed':>9}{'peak':>11}",
        *(
            f"{name:8}{each.step_ns / 1e6:9.2f}{each.exposed_ns / 1e6:9.2f}"
            f"{human_bytes(analyze(each.schedule).peak_bytes):>11}"
            for name, each in (("before", before), ("after", after))
        ),
        f"bound   {after.lower_bound_ns / 1e6:9.2f}",
        "",
    ]
    schedule = result.schedule
    following = _next_compute(schedule)
    for start in schedule.starts():
        wait = schedule.wait_of(start)
        at = schedule.position(start.name)
        until = "nobody" if wait is None else following[schedule.position(wait.name)]
        group = "" if start.comm is None else start.comm.group
        exposed = after.collectives[start.name].exposed_ns / 1e3
        lines.append(
            f"{start.op} {start.name} @{group}: starts before {following[at]}, waited for before {until}"
            + (f", exposed {exposed:.0f}us" if exposed >= 1 else "")
        )
    return "\n".join(lines) + "\n"


def _next_compute(schedule: Schedule) -> list[str]:
    """For each position, the first kernel or library call from there on."""
    names, name = [], "the end"
    for node in reversed(schedule.nodes):
        name = node.name if node.kind in COMPUTE else name
        names.append(name)
    return names[::-1]


if __name__ == "__main__":
    for case in CORPUS:
        case.with_suffix(".plan").write_text(plan_text(planned(case)))
