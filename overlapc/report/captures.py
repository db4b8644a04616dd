"""How Dynamo captured a program: its pieces, graph breaks, and recompilations with their reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from overlapc.fx.versions.dynamo import Traced, compile_id, graph_breaks, traced
from overlapc.report.model import Capture, GraphBreak, StepRecord
from overlapc.runtime import phases

_RESUMED = "torch_dynamo_resume_in_"  # prefix of Dynamo's name for the code after a graph break
_UNSYNCED = "_overlapc_unsynced"  # an attribute of sharded modules that guards read
_FORMS = "_overlapc_forms"  # an attribute that says how parameters are sharded and reduced, also read by guards
_ADOPTED = "parallel/access.py"  # holds the call that Dynamo traces when a sharded module is compiled
_SHOWN = 6  # graph breaks, and functions with variants, that are printed


class Captures:
    """Dynamo's captures in this process, since it started or since `clear` was called."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}  # number of the capture's graphs -> Dynamo's compile id
        self._breaks_before = 0

    def note(self, number: int) -> None:
        """Remember Dynamo's compile id for the graphs with this number; the backend calls it while Dynamo compiles."""
        self._ids[number] = compile_id()

    def captures(self) -> tuple[Capture, ...]:
        """Return the captures in the order of compilation.

        A capture that Dynamo has forgotten, or is still compiling, has only its number and frame.
        """
        captures = []
        for number, trace in self._traced().items():
            capture = Capture(number, self._ids[number].partition("/")[0])
            if trace is not None:
                capture = replace(capture, function=trace.function, source=trace.source, recompiled=trace.recompiled)
            captures.append(capture)
        return tuple(captures)

    def _traced(self) -> dict[int, Traced | None]:
        by_id: dict[str, list[Traced]] = {}
        for trace in traced():
            by_id.setdefault(trace.compile_id, []).append(trace)
        found: dict[int, Traced | None] = {}
        for number, name in reversed(self._ids.items()):  # latest first: after a reset, Dynamo uses its ids again
            found[number] = by_id[name].pop() if by_id.get(name) else None
        return dict(reversed(found.items()))

    def breaks(self) -> tuple[GraphBreak, ...]:
        """Return one GraphBreak for each line, with the number of times that Dynamo broke the graph there."""
        counted = Counter(graph_breaks()[self._breaks_before :])
        return tuple(GraphBreak(each.source, each.code, each.reason, times) for each, times in counted.items())

    def seconds(self) -> Mapping[str, float]:
        """Return the compile time by phase, in seconds, Dynamo's first."""
        dynamo_s = sum(each.seconds for each in self._traced().values() if each is not None)
        return {**({"Dynamo": dynamo_s} if dynamo_s else {}), **phases.seconds_by_phase()}

    def clear(self) -> None:
        """Forget all captures, graph breaks and compile times so far."""
        self._ids.clear()
        self._breaks_before = len(graph_breaks())
        phases.clear()


CAPTURES = Captures()


def captures_lines(step: StepRecord) -> Iterator[str]:
    """Yield the report's lines about graph breaks, functions compiled for several cases, and compile time."""
    called = {graph.number for graph, _ in step.called}
    pieces = list(dict.fromkeys(each.frame for each in step.captures if each.number in called))
    if len(pieces) > 1 or step.breaks:
        yield f"pieces       {len(pieces)}: no node is scheduled across their boundaries"
    for each in step.breaks[:_SHOWN]:
        times = f", {each.times} times" if each.times > 1 else ""
        code = f" `{each.code.strip()}`" if each.code else ""
        yield f"  broken at {each.source}{code}{times}: {each.reason}"
    if len(step.breaks) > _SHOWN:
        yield f"  and at {len(step.breaks) - _SHOWN} more lines"
    by_frame: dict[str, list[Capture]] = {}
    for capture in step.captures:
        by_frame.setdefault(capture.frame, []).append(capture)
    several = [captures for captures in by_frame.values() if len(captures) > 1]
    for captures in several[:_SHOWN]:
        yield from _variants(captures, step)
    if len(several) > _SHOWN:
        yield f"variants     of {len(several) - _SHOWN} more functions"
    if step.seconds:
        spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in step.seconds.items() if seconds >= 0.05)
        yield f"compiling    {sum(step.seconds.values()):.1f} s: {spent}"


def _variants(captures: Sequence[Capture], step: StepRecord) -> Iterator[str]:
    names = {graph.number: graph.name for graph in reversed(step.graphs)}
    yield f"variants     {len(captures)} of {shown_function(captures[0])}"
    for each in captures:
        yield f"  {names.get(each.number, each.number)}: {_why(each)}"


def _why(capture: Capture) -> str:
    if _UNSYNCED in capture.recompiled:
        return "because gradients are reduced in one variant and not in the other (no_sync, set_requires_gradient_sync)"
    if _FORMS in capture.recompiled:
        return "because parameters are sharded, gathered or reduced in another way"
    return f"because {capture.recompiled}" if capture.recompiled else "the first"


def shown_function(capture: Capture) -> str:
    """Return `forward (train.py:7)`, or after a graph break `forward from line 9 (train.py:9)`."""
    function, _, line = capture.function.removeprefix(_RESUMED).rpartition("_at_")
    if capture.function.startswith(_RESUMED) and function:
        return f"{function} from line {line} ({capture.source})"
    if _ADOPTED in capture.source:
        return "the sharded model"
    return f"{capture.function} ({capture.source})" if capture.function else f"function {capture.frame}"
