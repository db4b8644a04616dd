"""Processes that compile Triton kernels side by side.

Compiling is mostly Python, so threads would take turns. Workers start while torch still traces the graph (`start`), are
shared by the graphs that follow, and end when nobody needed them for a minute, or with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from overlapc.runtime.cache import KernelCache, content_key
from overlapc.runtime.triton_compile import Specification

MOST_WORKERS = 16
IDLE_S = 60.0
_FEW = 2  # for so few kernels a worker would start for longer than it works


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

    def compile(self, specifications: Sequence[Specification]) -> list[bool]:
        """Compiles all of them; of each, whether it worked. A worker that dies leaves the rest to the others."""
        jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
        for at in range(len(specifications)):
            jobs.put(at)
        done = [False] * len(specifications)

        def feed(process: subprocess.Popen[str]) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            while True:
                try:
                    at = jobs.get_nowait()
                except queue.Empty:
                    return
                try:
                    process.stdin.write(specifications[at].text() + "\n")
                    process.stdin.flush()
                    answer = process.stdout.readline()
                except (BrokenPipeError, ValueError):  # it died, or was closed
                    return
                if not answer:
                    return
                done[at] = json.loads(answer) == "ok"

        with self._lock:  # a worker answers one at a time
            threads = [threading.Thread(target=feed, args=(process,), daemon=True) for process in self._processes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return done

    def close(self) -> None:
        """Lets the workers end, once what is being compiled is done."""
        with self._lock:
            for process in self._processes:
                if process.stdin is not None:
                    with contextlib.suppress(BrokenPipeError):  # it died
                        process.stdin.close()
            for process in self._processes:
                process.wait()


class _Shared:
    """This process's workers, and when to let them go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: Workers | None = None
        self._timer: threading.Timer | None = None

    def get(self) -> Workers:
        with self._lock:
            if self._workers is None:
                self._workers = Workers(_count())
                atexit.register(self.close)
            self._rest()
            return self._workers

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
    """This rank's share of the cores."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) // ranks))


def start() -> None:
    """Starts the workers, which takes a second of theirs and none of ours."""
    if _count() > 1:
        _shared.get()


def compile_ahead(specifications: Sequence[Specification], cache_dir: Path) -> None:
    """Compiles what was not compiled before, in workers; what fails is left for the caller to compile and report."""
    ready = KernelCache(cache_dir, "triton_kernels")
    keys = {content_key(each.text()): each for each in specifications}
    missing = {key: each for key, each in keys.items() if ready.read(key, ".ready") is None}
    if len(missing) <= _FEW or _count() == 1:
        return
    done = _shared.get().compile(list(missing.values()))
    for key, worked in zip(missing, done, strict=True):
        if worked:
            ready.get_or_build(key, ".ready", lambda path: _touch(path))


def _touch(path: Path) -> None:
    path.write_text("compiled; the kernel lies in Triton's cache\n")
