"""What Dynamo made of a program: the pieces that it captured, graph breaks, recompilations and their reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from overlapc.fx.versions import Traced, compile_id, graph_breaks, traced
from overlapc.report.model import Capture, GraphBreak, StepRecord
from overlapc.runtime import phases

_RESUMED = "torch_dynamo_resume_in_"  # how Dynamo names what is behind a graph break
_UNSYNCED = "_overlapc_unsynced"  # an attribute of sharded modules, in guards
_KEYS = "_overlapc_keys"  # which name the parameters of one model
_ADOPTED = "parallel/access.py"  # the call that Dynamo traces of a sharded module that was compiled
_SHOWN = 6  # breaks, and functions with variants


class Captures:
    """Of this process, since it began or `clear` was called."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}  # number of its graphs -> Dynamo's id
        self._breaks_before = 0

    def note(self, number: int) -> None:
        """Called by the backend within Dynamo's compilation, for the graphs that get this number."""
        self._ids[number] = compile_id()

    def captures(self) -> tuple[Capture, ...]:
        """In the order of compilation. Of what Dynamo has forgotten, or still compiles, no more than its number."""
        found = []
        for number, of in self._traced().items():
            capture = Capture(number, self._ids[number].partition("/")[0])
            if of is not None:
                capture = replace(capture, function=of.function, source=of.source, recompiled=of.recompiled)
            found.append(capture)
        return tuple(found)

    def _traced(self) -> dict[int, Traced | None]:
        known: dict[str, list[Traced]] = {}
        for each in traced():
            known.setdefault(each.compile_id, []).append(each)
        found: dict[int, Traced | None] = {}
        for number, name in reversed(self._ids.items()):  # a reset of Dynamo begins with its first id again
            found[number] = known[name].pop() if known.get(name) else None
        return dict(reversed(found.items()))

    def breaks(self) -> tuple[GraphBreak, ...]:
        """Each line once, with how often Dynamo came to it."""
        counted = Counter(graph_breaks()[self._breaks_before :])
        return tuple(GraphBreak(each.source, each.code, each.reason, times) for each, times in counted.items())

    def seconds(self) -> Mapping[str, float]:
        """By phase; Dynamo's first."""
        dynamo_s = sum(each.seconds for each in self._traced().values() if each is not None)
        return {**({"Dynamo": dynamo_s} if dynamo_s else {}), **phases.seconds_by_phase()}

    def clear(self) -> None:
        """Forgets all of it."""
        self._ids.clear()
        self._breaks_before = len(graph_breaks())
        phases.clear()


CAPTURES = Captures()


def captures_lines(step: StepRecord) -> Iterator[str]:
    """In how many pieces a step runs, broken where; which of them were compiled for more than one case, and why."""
    called = {graph.number for graph, _ in step.called}
    pieces = list(dict.fromkeys(each.frame for each in step.captures if each.number in called))
    if len(pieces) > 1 or step.breaks:
        yield f"pieces       {len(pieces)}: nothing is scheduled across their borders"
    for each in step.breaks[:_SHOWN]:
        times = f", {each.times} times" if each.times > 1 else ""
        code = f" `{each.code.strip()}`" if each.code else ""
        yield f"  broken at {each.source}{code}{times}: {each.reason}"
    if len(step.breaks) > _SHOWN:
        yield f"  and at {len(step.breaks) - _SHOWN} lines more"
    by_frame: dict[str, list[Capture]] = {}
    for capture in step.captures:
        by_frame.setdefault(capture.frame, []).append(capture)
    several = [captures for captures in by_frame.values() if len(captures) > 1]
    for captures in several[:_SHOWN]:
        yield from _variants(captures, step)
    if len(several) > _SHOWN:
        yield f"variants     of {len(several) - _SHOWN} functions more"
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
        return "because gradients are reduced in one and not in the other (no_sync, set_requires_gradient_sync)"
    if _KEYS in capture.recompiled:
        return "because it is another instance of the model, with parameters of its own"
    return f"because {capture.recompiled}" if capture.recompiled else "the first"


def shown_function(capture: Capture) -> str:
    """`forward (train.py:7)`; of a piece behind a graph break, `forward from line 9 (train.py:9)`."""
    function, _, line = capture.function.removeprefix(_RESUMED).rpartition("_at_")
    if capture.function.startswith(_RESUMED) and function:
        return f"{function} from line {line} ({capture.source})"
    if _ADOPTED in capture.source:
        return "the sharded model"
    return f"{capture.function} ({capture.source})" if capture.function else f"function {capture.frame}"
