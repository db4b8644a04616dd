"""Queues that run commands in order, overlapped with compute: a thread on a CPU, a stream on a GPU.

Both wait for peers: at most `timeout_s` for one flag, after which an error names the peer. On a CPU the wait for the
collective raises it. On a GPU nothing can stop a stream that waits, so the process prints the error and aborts, as it
does when NCCL's watchdog times out.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from overlapc.errors import PeerLost
from overlapc.runtime.copies.commands import Command, Copy, Post, Run, Until, in_run

NameOf = Callable[[int], str]  # rank within the group -> its name in messages
_POLLS = 200  # of a flag before a thread begins to sleep between polls
_SLEEP_S = 50e-6


def reached(value: int, wanted: int) -> bool:
    """Whether a 32-bit flag that counts up and wraps around has reached `wanted`."""
    return (value - wanted) & 0xFFFFFFFF < 1 << 31


def lost(name: str, peer: str, until: Until, timeout_s: float) -> PeerLost:
    """Return the error for a peer that did not do what a collective waited for."""
    return PeerLost(
        f"{name}: {peer} has not {until.what} within {timeout_s:g} s (collective {until.value} by copies in this group)"
        f"\nhint: {peer} died, hangs, or runs other collectives than this rank: see its output; if it is only slow,"
        " give init_process_group a longer timeout"
    )


class ThreadQueue:
    """Runs commands on its own thread: the queue for ranks on CPUs."""

    def __init__(self, name: str, name_of: NameOf, timeout_s: float) -> None:
        self._name, self._name_of, self._timeout_s = name, name_of, timeout_s
        self._jobs: queue.SimpleQueue[tuple[Sequence[Command], Run, Future[None]] | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        threading.Thread(target=self._run, name=f"copies of {name}", daemon=True).start()

    def run(self, commands: Sequence[Command], run: Run) -> Future[None]:
        """Enqueue commands; return a future for `wait`."""
        done: Future[None] = Future()
        self._jobs.put((commands, run, done))
        return done

    def wait(self, done: Future[None]) -> None:
        """Block until the commands of this future are done; raise PeerLost if a peer does not answer."""
        done.result()

    def drain(self) -> None:
        """Block until all commands are done."""
        self.run((), Run(0, 0)).result()

    def close(self) -> None:
        """End the thread once it has run the commands in the queue."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            commands, run, done = job
            try:
                if self._failed is not None:
                    raise self._failed
                for command in commands:
                    self._do(command if isinstance(command, Copy) else in_run(command, run))
                done.set_result(None)
            except BaseException as error:  # noqa: BLE001  # `wait` raises it: PeerLost, or a bug in overlapc
                self._failed = error  # later commands would wait for data that was never sent
                done.set_exception(error)
            del job, commands, done  # do not hold the last job while waiting for the next one

    def _do(self, command: Command) -> None:
        if isinstance(command, Copy):
            ctypes.memmove(command.target, command.source, command.bytes)
        elif isinstance(command, Post):
            ctypes.c_uint32.from_address(command.flag).value = command.value & 0xFFFFFFFF
        else:
            self._wait_for_flag(command)

    def _wait_for_flag(self, until: Until) -> None:
        flag = ctypes.c_uint32.from_address(until.flag)
        polls, deadline_s = 0, 0.0
        while not reached(flag.value, until.value):
            polls += 1
            if polls == _POLLS:
                deadline_s = time.monotonic() + self._timeout_s
            elif polls > _POLLS:
                if time.monotonic() > deadline_s:
                    raise lost(self._name, self._name_of(until.peer), until, self._timeout_s)
                time.sleep(_SLEEP_S)


class StreamQueue:
    """Enqueues commands on its own stream of a GPU: copy engines run the copies, the GPU's front end waits for flags.

    Copies within the GPU run on a second stream; on the first one the links would be idle during them.
    """

    def __init__(self, name: str, name_of: NameOf, timeout_s: float, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._local_copies = torch.cuda.Stream(device, priority=-1)
        self._driver = _Driver()
        self._watch = _Watch(name, name_of, timeout_s, self._driver, device)

    def run(self, commands: Sequence[Command], run: Run) -> torch.cuda.Event:
        """Enqueue commands after earlier ones and after the current stream's work; return an event for `wait`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        at = self._stream.cuda_stream
        driver = self._driver
        flags: list[Post | Until] = []
        untils: list[Until] = []
        forked = False
        for command in commands:
            if isinstance(command, Copy):
                if flags:
                    driver.flags(at, flags)
                    flags = []
                if command.own and not forked:
                    self._local_copies.wait_stream(self._stream)
                    forked = True
                driver.copy(self._local_copies.cuda_stream if command.own else at, command)
            else:
                flag = in_run(command, run)
                flags.append(flag)
                if isinstance(flag, Until):
                    untils.append(flag)
        if flags:
            driver.flags(at, flags)
        if forked:
            self._stream.wait_stream(self._local_copies)
        event = torch.cuda.Event()
        event.record(self._stream)
        self._watch.add(event, untils)
        return event

    def wait(self, done: torch.cuda.Event) -> None:
        """Make the current stream wait for the commands of this event."""
        torch.cuda.current_stream(self._device).wait_event(done)

    def drain(self) -> None:
        """Block until all commands are done."""
        self._stream.synchronize()

    def close(self) -> None:
        """Block until all commands are done, and end the watchdog thread."""
        self._stream.synchronize()
        self._watch.close()


Queue = ThreadQueue | StreamQueue

_WAIT, _WRITE, _AT_LEAST = 1, 2, 0  # CU_STREAM_MEM_OP_WAIT_VALUE_32, _WRITE_VALUE_32; CU_STREAM_WAIT_VALUE_GEQ


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams (48 bytes), with the fields of its 32-bit waits and writes."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


class _Driver:
    """The three calls of the CUDA driver for which torch has no interface that takes addresses."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._copy = library.cuMemcpyAsync
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._operate = library.cuStreamBatchMemOp_v2
        self._operate.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
        self._fetch = library.cuMemcpyDtoHAsync_v2
        self._fetch.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def copy(self, stream: int, command: Copy) -> None:
        _succeeded(self._copy(command.target, command.source, command.bytes, stream), "cuMemcpyAsync")

    def flags(self, stream: int, commands: Sequence[Post | Until]) -> None:
        operations = (_Operation * len(commands))()
        for operation, command in zip(operations, commands, strict=True):
            waits = isinstance(command, Until)
            operation.operation = _WAIT if waits else _WRITE
            operation.address, operation.value = command.flag, command.value & 0xFFFFFFFF
            operation.flags = _AT_LEAST if waits else 0  # by default a write is fenced: peers see all writes before it
        _succeeded(self._operate(stream, len(commands), operations, 0), "cuStreamBatchMemOp")

    def value(self, stream: torch.cuda.Stream, flag: int) -> int:
        """Return the current value of a flag."""
        found = ctypes.c_uint32()
        _succeeded(self._fetch(ctypes.byref(found), flag, 4, stream.cuda_stream), "cuMemcpyDtoHAsync")
        stream.synchronize()
        return found.value


def _succeeded(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} failed with CUDA driver error {code}")


class _Watch:
    """A watchdog thread that aborts the process if enqueued commands do not finish in time."""

    _EVERY_S = 0.5

    def __init__(self, name: str, name_of: NameOf, timeout_s: float, driver: _Driver, device: torch.device) -> None:
        self._name, self._name_of, self._timeout_s = name, name_of, timeout_s
        self._driver, self._device = driver, device
        self._in_flight: deque[tuple[torch.cuda.Event, list[Until]]] = deque()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name=f"watch over copies of {name}", daemon=True).start()

    def add(self, event: torch.cuda.Event, untils: list[Until]) -> None:
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()
        self._in_flight.append((event, untils))

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)
        oldest: torch.cuda.Event | None = None
        since_s = time.monotonic()
        while not self._closed.wait(self._EVERY_S):
            flying = next(iter(tuple(self._in_flight)), None)
            if flying is None or flying[0].query() or flying[0] is not oldest:
                oldest = None if flying is None else flying[0]
                since_s = time.monotonic()
                continue
            if time.monotonic() - since_s > self._timeout_s:
                missing = next(
                    (each for each in flying[1] if not reached(self._driver.value(stream, each.flag), each.value)), None
                )
                if missing is None:  # the queue waits for this rank's own compute, not for a peer
                    since_s = time.monotonic()
                    continue
                error = lost(self._name, self._name_of(missing.peer), missing, self._timeout_s)
                print(f"overlapc: {error}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGABRT)


def queue_on(device: torch.device, name: str, name_of: NameOf, timeout_s: float) -> Queue:
    """Return a new queue for ranks on devices of this type."""
    if device.type == "cpu":
        return ThreadQueue(name, name_of, timeout_s)
    return StreamQueue(name, name_of, timeout_s, device)


def unsupported(device: torch.device) -> str | None:
    """Return why copies are not supported on this device and machine, or None if they are."""
    if device.type == "cpu":
        import platform

        machine = platform.machine().lower()
        ordered = machine in ("x86_64", "amd64")  # a flag becomes visible after the data stored before it
        return None if ordered else f"copies between CPU ranks rely on x86-64's order of stores; this CPU is {machine}"
    if device.type != "cuda":
        return f"copies are not supported on {device.type}"
    try:
        from torch.distributed import _symmetric_memory as found
    except ImportError:
        return "this torch has no symmetric memory"
    needs: Any = ("empty", "rendezvous")
    return None if all(hasattr(found, name) for name in needs) else "this torch has no symmetric memory"
