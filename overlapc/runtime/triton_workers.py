"""Processes that compile Triton kernels in parallel.

Compilation is mostly Python, so threads would wait for each other. Workers start while torch still traces the graph
(`start`), are shared by all graphs, and end after a minute without work, or with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlapc.runtime.triton_compile import Binary, Specification, answered

MOST_WORKERS = 16
IDLE_S = 60.0
_END_S = 10.0  # how long a terminated worker may take to end
_FEW = 2  # for up to this many kernels starting workers takes longer than compiling


Compiled = tuple[Binary, bytes]  # facts about a cubin, and the cubin


class Workers:
    """A pool of worker processes. Every method may be called from any thread."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "overlapc.runtime.triton_compile"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            for _ in range(count)
        ]

    @property
    def alive(self) -> bool:
        """Whether all workers run; Ctrl-C in a terminal ends them."""
        return all(process.poll() is None for process in self._processes)

    def compile(self, specifications: Sequence[Specification]) -> list[Compiled | None]:
        """Compile all; the result is None where that failed. If a worker dies, the others take over its share."""
        jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
        for at in range(len(specifications)):
            jobs.put(at)
        done: list[Compiled | None] = [None] * len(specifications)

        def feed(process: subprocess.Popen[str]) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            while True:
                try:
                    at = jobs.get_nowait()
                except queue.Empty:
                    return
                request = specifications[at].text() + "\n"
                try:
                    process.stdin.write(request)
                    process.stdin.flush()
                    done[at] = answered(request, process.stdout.readline())
                except (BrokenPipeError, ValueError):  # it died, was closed, or would mix up its next answers, too
                    process.kill()
                    return

        with self._lock:  # a worker answers one request at a time
            threads = [threading.Thread(target=feed, args=(process,), daemon=True) for process in self._processes]
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            except BaseException:  # such as KeyboardInterrupt; the threads end with the workers
                self._end()
                raise
        return done

    def close(self) -> None:
        """End the workers once current compilations are done."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()  # closing its input would not end it: a forked child may have a copy of the pipe
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()


class _Shared:
    """The workers of this process, and the timer that ends them."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # the workers belong to the parent

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._workers: Workers | None = None
        self._timer: threading.Timer | None = None

    def get(self) -> Workers:
        with self._lock:
            if self._workers is not None and not self._workers.alive:
                self._workers.close()
                self._workers = None
            if self._workers is None:
                self._workers = Workers(_count())
                atexit.register(self.close)
            self._rest()
            return self._workers

    @property
    def running(self) -> bool:
        """Whether workers have been started and have not ended."""
        return self._workers is not None

    def close(self) -> None:
        with self._lock:
            workers, self._workers = self._workers, None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if workers is not None:
            workers.close()
        atexit.unregister(self.close)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(IDLE_S, self.close)
        self._timer.daemon = True
        self._timer.start()


_shared = _Shared()


def _count() -> int:
    """Return the number of workers: this rank's share of the cores."""
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) // _ranks_on_host()))


def _ranks_on_host() -> int:
    """Return the number of ranks on this host, as torchrun tells it; with other launchers, at most one per GPU."""
    told = os.environ.get("LOCAL_WORLD_SIZE")
    if told:
        return max(1, int(told))
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return min(ranks, max(1, torch.cuda.device_count()))


def start() -> None:
    """Start the workers, without waiting for the second that they take to start."""
    if _count() > 1:
        _shared.get()


def worth_it(kernels: int) -> bool:
    """Whether this many kernels compile faster in workers, because there are enough of them or workers run already."""
    return kernels > 0 and _count() > 1 and (kernels > _FEW or _shared.running)


def compile_all(specifications: Sequence[Specification]) -> list[Compiled | None]:
    """Run `Workers.compile` on this process's workers, which are started if necessary."""
    return _shared.get().compile(specifications)
