"""Attribute the time of a compiling process to phases by sampling its stacks, in the same way for every system.

A thread reads the stacks of the main thread and of autograd's threads every few milliseconds; a sample counts for the
innermost frame that identifies a phase. Threads that Python started (watchdogs, feeders of worker processes) wait most
of the time and do not count. Nothing is patched and nothing runs slower, unlike under cProfile, which triples Dynamo's
time.

The sampling thread gets Python's lock when another thread gives it up, mostly in a call into C. So of code that often
calls into C, the file with these calls counts for what runs between them, too: `simulator/native.py`, which calls the
simulator in C 10,000 times a second, counts for the whole search of `passes/refine.py`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import FrameType

PHASES = ("imports", "dynamo", "aot", "compiler", "run")
"""imports: loading modules, whoever imports them; dynamo: tracing and guards; aot: AOTAutograd; compiler: the backend's
own work, including loads from its cache; run: everything else, which is the step itself."""

_OF_MODULE = (  # the first prefix of a module's name decides; not of its path, because a clone may lie in any folder
    ("overlapc.runtime.step", "run"),
    ("torch._dynamo.eval_frame", ""),  # on the stack of every compiled call, so it identifies no phase
    ("torch._functorch._aot_autograd.runtime_wrappers", ""),
    ("torch._inductor", "compiler"),
    ("triton", "compiler"),
    ("overlapc.launch", ""),
    ("overlapc", "compiler"),
    ("torch._functorch", "aot"),
    ("torch._dynamo", "dynamo"),
)


class Sampled:
    """A sampling profiler: `with Sampled() as sampled:`, then `sampled.seconds()`.

    clock: a sample counts for the time that passed on this clock since the last one; time.process_time ignores waits.
    """

    def __init__(self, every_s: float = 0.003, clock: Callable[[], float] = time.perf_counter) -> None:
        self._every_s = every_s
        self._clock = clock
        self._seen: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.moments = 0  # number of samples so far
        self._total_s = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Sampled:
        self._began = self._clock()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self._total_s = self._clock() - self._began

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase, which add up to the whole time."""
        of_phase = dict.fromkeys(PHASES, 0.0)
        for (phase, _), seconds in self._scaled().items():
            of_phase[phase] += seconds
        return of_phase

    def details(self, most: int = 12) -> dict[str, float]:
        """Return the `most` largest times in seconds, by phase and the module being imported or the running file."""
        longest = sorted(self._scaled().items(), key=lambda each: -each[1])[:most]
        return {f"{phase}: {what}": seconds for (phase, what), seconds in longest}

    def _scaled(self) -> dict[tuple[str, str], float]:
        """Return the sampled seconds scaled to the whole time, which begins and ends between two samples."""
        share = self._total_s / (sum(self._seen.values()) or 1.0)
        return {what: seconds * share for what, seconds in self._seen.items()}

    def _watch(self) -> None:
        before = self._clock()
        while not self._done.wait(self._every_s):
            started = {each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}
            started.discard(threading.main_thread().ident)
            frames = sys._current_frames()
            found = [_phase(frame) for ident, frame in frames.items() if ident not in started]
            now = self._clock()
            # Backward on a GPU compiles on autograd's thread while the main thread waits: of all threads, count the one
            # in the earliest phase of PHASES.
            phase, what = min(found, key=lambda of_thread: PHASES.index(of_thread[0]))
            self._seen[phase, what] += now - before
            before = now
            self.moments += 1


def _phase(frame: FrameType) -> tuple[str, str]:
    for each in _outwards(frame):
        file = each.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return "imports", _imported(each)
        if file.startswith("<overlapc "):  # a generated wrapper
            return "run", file
        module = str(each.f_globals.get("__name__", "")) + "."
        phase = next((phase for name, phase in _OF_MODULE if module.startswith(name + ".")), "")
        if phase:
            return phase, "/".join(file.rsplit("/", 2)[-2:])
    return "run", "step"


def _imported(frame: FrameType) -> str:
    """Return the outermost module that is being loaded: without its import, all of this time would be saved."""
    name = ""
    for each in _outwards(frame):
        if each.f_code.co_name == "_find_and_load" and "importlib" in each.f_code.co_filename:
            name = str(each.f_locals.get("name", name))
    return name


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
