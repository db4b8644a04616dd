"""The simulator in C (`replay.c`), built once per machine and cached with the kernels; some 30 times as fast as Python.
The same library contains the search of `passes/refine.py` (`search.c`; native_search.py).

Its results are bitwise equal to those of `machine.py` and `incremental.Replay`, so ranks agree on plans even if only
some of them have a compiler. Without a compiler the simulation runs in Python.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import subprocess
import weakref
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from overlapc.errors import ToolchainError
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.simulator.incremental import BLOCK, Moves, Replay, Timing
from overlapc.estimators.simulator.machine import Costs, costs_of
from overlapc.runtime.cache import KernelCache, content_key
from overlapc.runtime.toolchain import compile_error, find_compiler
from overlapc.schedule.model import Schedule

_SOURCE = Path(__file__).with_name("search.c")  # it includes replay.c
# Without contraction to fused multiply-add, times equal those of Python's floats.
_FLAGS = ("-x", "c", "-std=gnu11", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-w")
_log = logging.getLogger("overlapc")

_Address = ctypes.c_void_p
_Ints, _Doubles = _Address, _Address  # of arrays
_ASK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_double))


class _Totals(ctypes.Structure):
    """`Totals` of replay.c."""

    _fields_ = (
        ("step_ns", ctypes.c_double),
        ("exposed_ns", ctypes.c_double),
        ("idle_ns", ctypes.c_double),
        ("blocks_replayed", ctypes.c_long),
    )


def replay_of(schedule: Schedule, profile: DeviceProfile, cache_dir: Path | None) -> Moves:
    """Return the incremental simulation of a schedule: in C if replay.c can be built and cached in `cache_dir`."""
    library = None if cache_dir is None else library_in(cache_dir)
    return Replay(schedule, profile) if library is None else NativeReplay(library, schedule, profile)


def simulated(costs: Costs, cache_dir: Path | None) -> Simulated | None:
    """Simulate a whole schedule in C; None if replay.c cannot be built."""
    library = None if cache_dir is None else library_in(cache_dir)
    if library is None:
        return None
    count = len(costs.ns)
    times, facts = array("d", bytes(8 * (3 * count + 2))), _Facts(costs)
    library.simulate(*facts.arguments, times.buffer_info()[0])
    facts.mixes.raise_error()
    start, end, exposed = (tuple(times[count * part : count * (part + 1)]) for part in range(3))
    return Simulated(start, end, exposed, *times[3 * count :])


class Simulated(NamedTuple):
    """The times of a simulation: start, end and exposed time of each node; the step time, and the idle time in it."""

    start_ns: Sequence[float]
    end_ns: Sequence[float]
    exposed_ns: Sequence[float]
    step_ns: float
    idle_ns: float


class NativeReplay(Moves):
    """`Replay` in C."""

    def __init__(self, library: ctypes.CDLL, schedule: Schedule, profile: DeviceProfile, *, block: int = BLOCK) -> None:
        super().__init__(len(schedule.nodes))
        self.library, self._facts = library, _Facts(costs_of(schedule, profile))
        self.pointer = library.replay_new(*self._facts.arguments, block)
        self._end = weakref.finalize(self, library.replay_free, self.pointer)
        self.timing = self._noted(library.replay_now(self.pointer))

    def try_window(self, low: int, nodes: Sequence[int]) -> Timing:
        """See `Moves.try_window`."""
        window = array("i", nodes)
        return self._noted(self.library.replay_try(self.pointer, low, window.buffer_info()[0], len(window)))

    def apply(self, low: int, nodes: Sequence[int]) -> None:
        """See `Moves.apply`."""
        self.try_window(low, nodes)
        self.timing = self._noted(self.library.replay_apply(self.pointer))
        self._put(low, nodes)

    def raise_error(self) -> None:
        """Raise the error of a call from C, if there was one."""
        self._facts.mixes.raise_error()

    def _noted(self, found: Any) -> Timing:
        self.raise_error()
        totals = found.contents
        self.blocks_replayed = totals.blocks_replayed
        return Timing(totals.step_ns, totals.exposed_ns, totals.idle_ns)


class _Facts:
    """The arrays that describe a schedule to replay.c; they must live as long as the replay, which reads them."""

    def __init__(self, costs: Costs) -> None:
        count, profile = len(costs.ns), costs.profile
        waits_for = array("i", bytes(4 * count))
        for wait, start in costs.waits_for.items():
            waits_for[wait] = start
        self._ints = array("i", [*costs.step, *costs.load, *costs.traffic, *costs.queue]) + waits_for
        self._ns = array("d", costs.ns)
        held, rates = profile.collectives_wait_for_kernels, (costs.launch_ns, costs.gap_ns)
        self._profile = array("d", [*rates, profile.synchronous, held])
        self.mixes = _Mixes(costs.mix)
        self._ask = _ASK(self.mixes.answer)
        sizes = count, costs.queues, 1 + max(costs.load, default=0)
        arrays = (each.buffer_info()[0] for each in (self._ints, self._ns, self._profile))
        self.arguments = (*sizes, *arrays, self._ask)


class _Mixes:
    """Computes slowdown factors for replay.c, which calls `answer`."""

    def __init__(self, mix: Callable[[int, tuple[int, ...]], tuple[float, Sequence[float]]]) -> None:
        self._mix = mix
        self._error: BaseException | None = None

    def answer(self, load: int, count: int, traffic: Sequence[int], factors: list[float]) -> None:
        """Write the factors of compute and of each running collective; ones if this fails (see `raise_error`)."""
        slow: float = 1.0
        by_queue: Sequence[float] = [1.0] * count
        try:
            slow, by_queue = self._mix(load, tuple(traffic[:count]))
        except BaseException as error:  # noqa: BLE001 (Ctrl-C, too: an exception cannot pass through C)
            self._error = error
        for number, factor in enumerate((slow, *by_queue)):
            factors[number] = factor

    def raise_error(self) -> None:
        """Raise the error of a call from C, if there was one: all results since then are meaningless."""
        if self._error is not None:
            raise self._error


@lru_cache(None)
def library_in(cache_dir: Path) -> ctypes.CDLL | None:
    """Return the library built from replay.c; None, with a log message, if it cannot be built."""
    try:
        library = ctypes.CDLL(str(_built(cache_dir)))
    except (ToolchainError, OSError) as error:
        _log.info("plans are simulated in Python, which takes 30 times as long: %s", error)
        return None
    schedule = (ctypes.c_int, ctypes.c_int, ctypes.c_int, _Ints, _Doubles, _Doubles, _ASK)
    library.replay_new.argtypes, library.replay_new.restype = (*schedule, ctypes.c_int), ctypes.c_void_p
    library.replay_try.argtypes = ctypes.c_void_p, ctypes.c_int, _Ints, ctypes.c_int
    library.simulate.argtypes, library.simulate.restype = (*schedule, _Doubles), None
    library.search_new.argtypes, library.search_new.restype = (_Address,), _Address
    library.search_run.argtypes = _Address, ctypes.c_long, ctypes.c_long
    library.search_run.restype, library.search_free.argtypes = _Address, (_Address,)
    for function in (library.replay_now, library.replay_apply, library.replay_free):
        function.argtypes = (ctypes.c_void_p,)
    for function in (library.replay_now, library.replay_try, library.replay_apply):
        function.restype = ctypes.POINTER(_Totals)
    return library


def _built(cache_dir: Path) -> Path:
    # The key does not contain the compiler, because all give the same numbers; a warm start need not look for one.
    texts = (path.read_text() for path in (_SOURCE, _SOURCE.with_name("replay.c")))
    key = content_key(*texts, *_FLAGS, platform.machine())

    def build(library: Path) -> None:
        line = [*find_compiler().command, *_FLAGS, "-o", str(library), str(_SOURCE), "-lm"]
        result = subprocess.run(line, capture_output=True, text=True)
        if result.returncode:
            raise compile_error(line, result.stderr, _SOURCE)

    return KernelCache(cache_dir, "simulators").get_or_build(key, ".so", build)
