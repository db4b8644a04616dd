"""A simulated schedule as text, node by node: which compute overlaps communication, and where compute waits.

           at us        us  mark  node
             0.0      60.0  >     ag0 = all_gather(%p0)       @dp
             0.0      48.0  |     %h = kernel(%x)             48.0 beside communication
            48.0      12.0  !     %w0 = wait(ag0)             12.0 exposed, 12.0 so far

Marks: `>` starts a collective on its queue, `|` is compute that overlaps a collective, `!` a wait that stalls compute,
`<` a wait that does not. A start's times are when it is issued and how long its collective runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from overlapc.estimators.timeline import Timeline
from overlapc.schedule.model import COMPUTE, Kind, Node
from overlapc.schedule.text import print_node


def walk_through(timeline: Timeline) -> str:
    """Return the text above for a simulated schedule, with sums. Views and no-ops, which take no time, are left out."""
    lines = [f"{timeline.schedule.name}: {'at us':>10} {'us':>9}  mark  node", *_lines(timeline)]
    lines.append(
        f"step {timeline.step_ns / 1e3:.1f} us: compute {timeline.compute_ns / 1e3:.1f},"
        f" exposed {timeline.exposed_ns / 1e3:.1f}, waiting for the host {timeline.launch_idle_ns / 1e3:.1f};"
        f" hidden {timeline.hidden_ns / 1e3:.1f}, lower bound {timeline.lower_bound_ns / 1e3:.1f}"
    )
    return "\n".join(lines) + "\n"


def _lines(timeline: Timeline) -> Iterator[str]:
    schedule = timeline.schedule
    running: dict[int, tuple[float, float]] = {}  # position of a start -> when its collective runs
    now_ns = exposed_ns = 0.0
    for at, node in enumerate(schedule.nodes):
        begin_ns, end_ns = timeline.start_ns[at], timeline.end_ns[at]
        if node.kind in (Kind.VIEW, Kind.NOOP):
            continue
        if node.kind is Kind.START:
            running[at] = (begin_ns, end_ns)
            yield _line(now_ns, end_ns - begin_ns, ">", node, f"@{node.queue}")
            continue
        running = {start: span for start, span in running.items() if span[1] > begin_ns}
        if node.kind in COMPUTE:
            beside_ns = max((min(end_ns, high) - max(begin_ns, low) for low, high in running.values()), default=0.0)
            note = f"{beside_ns / 1e3:.1f} beside communication" if beside_ns > 0 else ""
            yield _line(begin_ns, end_ns - begin_ns, "|" if beside_ns > 0 else " ", node, note)
        else:  # a wait, or a blocking collective
            exposed_ns += end_ns - begin_ns
            stands = end_ns > begin_ns
            note = (
                f"{(end_ns - begin_ns) / 1e3:.1f} exposed, {exposed_ns / 1e3:.1f} so far" if stands else "done already"
            )
            yield _line(begin_ns, end_ns - begin_ns, "!" if stands else "<", node, note)
        now_ns = max(now_ns, end_ns)


def _line(at_ns: float, ns: float, mark: str, node: Node, note: str) -> str:
    known = "" if node.estimate is not None or node.kind is Kind.WAIT else " (no estimate)"
    return f"{at_ns / 1e3:12.1f} {ns / 1e3:9.1f}  {mark}     {_summary(node):<60} {note}{known}".rstrip()


def _summary(node: Node) -> str:
    """Return a node in one line: its name, op and inputs."""
    reads = ", ".join(node.reads[:4]) + (", ..." if len(node.reads) > 4 else "")
    return f"{node.name} = {node.op}({reads})"


def describe(timeline: Timeline, name: str) -> str:
    """Return the details of a node: statement, time, buffers, the nodes that it depends on and its readers."""
    schedule = timeline.schedule
    node, at = schedule.node(name), schedule.position(name)
    readers = dict.fromkeys(reader.name for written in node.writes for reader in schedule.readers(written))
    makers = dict.fromkeys(maker.name for read in node.reads if (maker := schedule.producer(read)) is not None)
    origin = node.origin
    rows = [
        ("statement", print_node(schedule, node)),
        ("kind", node.kind.value),
        ("position", f"{at} of {len(schedule.nodes)}"),
        ("runs", f"{timeline.start_ns[at] / 1e3:.1f} to {timeline.end_ns[at] / 1e3:.1f} us"),
        ("defines", ", ".join(f"{each} ({schedule.buffers[schedule.root(each)].bytes} B)" for each in node.writes)),
        ("needs", ", ".join(makers)),
        ("needed by", ", ".join(readers)),
        ("module", origin.module),
        ("source", origin.source),
        ("fx", " ".join(origin.fx)),
    ]
    return "\n".join(f"{title:<10} {value}" for title, value in rows if value) + "\n"
