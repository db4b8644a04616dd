"""What the default passes make of the corpus, short enough to be read in a diff.

python tests/schedules/plans.py          # writes <case>.plan beside every <case>.sched: look at `git diff`
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from overlapc.config import Config
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.from_profile import from_profile
from overlapc.estimators.profiles.profile_file import load_profile
from overlapc.launch.plan import plan_text
from overlapc.passes.base import Context
from overlapc.planning.pass_context import context_of
from overlapc.report.model import GraphRecord
from overlapc.schedule.model import COMPUTE, Schedule
from overlapc.schedule.text import parse
from overlapc.units import human_bytes

HERE = Path(__file__).parent
CORPUS = sorted(HERE.glob("*.sched"))


@cache
def captured(path: Path) -> Schedule:
    """One schedule of the corpus, as its file says."""
    return parse(path.read_text())


def context(profile: DeviceProfile | None = None) -> Context:
    """The default configuration, by default on H200s."""
    profile = profile or load_profile("h200-nvlink")
    return context_of(Config(search_effort=Context.effort), profile, from_profile(profile))


def incoming(path: Path, profile: DeviceProfile | None = None) -> Schedule:
    """One schedule of the corpus, estimated as a profile says, by default today's of H200s."""
    estimate = context(profile).estimate
    assert estimate is not None
    schedule = captured(path)
    return schedule.with_estimates({node.name: estimate(node) for node in schedule.nodes})


@cache
def planned(path: Path) -> GraphRecord:
    """What `overlapc plan` makes of that schedule by default."""
    config = Config(profile="h200-nvlink", search_effort=Context.effort)
    (graph,) = plan_text(str(incoming(path)), config).steps[0].graphs
    return graph


def positions_text(graph: GraphRecord) -> str:
    """Step, exposed time and peak before and after, and where each collective starts and is waited for."""
    figures = (
        ("before", graph.before, graph.exposed_before_ns, graph.incoming_peak_bytes),
        ("after", graph.after, graph.exposed_after_ns, graph.peak_bytes),
    )
    lines = [
        f"{'':8}{'step ms':>9}{'exposed':>9}{'peak':>11}",
        *(
            f"{name:8}{order.step_ns / 1e6:9.2f}{exposed_ns / 1e6:9.2f}{human_bytes(peak_bytes):>11}"
            for name, order, exposed_ns, peak_bytes in figures
        ),
        f"bound   {graph.lower_bound_ns / 1e6:9.2f}",
        "",
    ]
    schedule = parse(graph.schedule)
    following = _next_compute(schedule)
    exposed_of = {row.name: row.exposed_after_ns for row in graph.collectives}
    for start in schedule.starts():
        wait = schedule.wait_of(start)
        at = schedule.position(start.name)
        until = "nobody" if wait is None else following[schedule.position(wait.name)]
        group = "" if start.comm is None else start.comm.group
        exposed = exposed_of[start.name] / 1e3
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
        case.with_suffix(".plan").write_text(positions_text(planned(case)))
