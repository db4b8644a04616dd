"""What runs commands in order beside compute: a thread on a CPU, a stream on a GPU.

Both wait for peers: at most `timeout_s` for one flag, after which the error names the peer. On a CPU whoever waits for
the collective raises it. On a GPU nothing can stop a stream that waits, so that the process ends with the message, as
it does when NCCL's watchdog gives up.
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

NameOf = Callable[[int], str]  # rank within the group -> what to call it
_POLLS = 200  # of a flag before a thread gives the core away
_NAP_S = 50e-6


def reached(value: int, wanted: int) -> bool:
    """Whether a flag of 32 bits that counts up, past its largest value too, is at `wanted` or further."""
    return (value - wanted) & 0xFFFFFFFF < 1 << 31


def lost(name: str, peer: str, until: Until, timeout_s: float) -> PeerLost:
    """The error for a peer that did not do what a collective waited for."""
    return PeerLost(
        f"{name}: {peer} has not {until.what} within {timeout_s:g} s (collective {until.value} of its group by copies)"
        f"\nhint: {peer} died, hangs, or runs other collectives than this rank: see its output; if it is only slow,"
        " give init_process_group a longer timeout"
    )


class ThreadQueue:
    """Runs commands on a thread of its own: the queue of ranks on CPUs."""

    def __init__(self, name: str, name_of: NameOf, timeout_s: float) -> None:
        self._name, self._name_of, self._timeout_s = name, name_of, timeout_s
        self._jobs: queue.SimpleQueue[tuple[Sequence[Command], Run, Future[None]] | None] = queue.SimpleQueue()
        self._failed: PeerLost | None = None
        threading.Thread(target=self._run, name=f"copies of {name}", daemon=True).start()

    def run(self, commands: Sequence[Command], run: Run) -> Future[None]:
        """Puts commands behind those before; the result is for `wait`."""
        done: Future[None] = Future()
        self._jobs.put((commands, run, done))
        return done

    def wait(self, done: Future[None]) -> None:
        """Returns when these are done. PeerLost for a peer that does not answer."""
        done.result()

    def drain(self) -> None:
        """Returns when all are done."""
        self.run((), Run(0, 0)).result()

    def close(self) -> None:
        """Ends the thread behind what it still has to do."""
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
            except PeerLost as error:
                self._failed = error  # what comes behind would wait for what never was sent
                done.set_exception(error)
            finally:
                done.cancel()  # ends `wait` after any other error, too, which is a defect of overlapc
            del job, commands, done  # while nothing comes, nothing of the last one is held

    def _do(self, command: Command) -> None:
        if isinstance(command, Copy):
            ctypes.memmove(command.target, command.source, command.bytes)
        elif isinstance(command, Post):
            ctypes.c_uint32.from_address(command.flag).value = command.value & 0xFFFFFFFF
        else:
            self._stand_until(command)

    def _stand_until(self, until: Until) -> None:
        flag = ctypes.c_uint32.from_address(until.flag)
        polls, deadline_s = 0, 0.0
        while not reached(flag.value, until.value):
            polls += 1
            if polls == _POLLS:
                deadline_s = time.monotonic() + self._timeout_s
            elif polls > _POLLS:
                if time.monotonic() > deadline_s:
                    raise lost(self._name, self._name_of(until.peer), until, self._timeout_s)
                time.sleep(_NAP_S)


class StreamQueue:
    """Enqueues commands on a stream of its own, for the copy engines of a GPU and for its front end, which waits.

    Copies within the GPU run on a second stream: on one they would take time in which the links do nothing.
    """

    def __init__(self, name: str, name_of: NameOf, timeout_s: float, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._beside = torch.cuda.Stream(device, priority=-1)
        self._driver = _Driver()
        self._watch = _Watch(name, name_of, timeout_s, self._driver, device)

    def run(self, commands: Sequence[Command], run: Run) -> torch.cuda.Event:
        """Puts commands behind those before and behind what the current stream was given; an event for `wait`."""
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
                    self._beside.wait_stream(self._stream)
                    forked = True
                driver.copy(self._beside.cuda_stream if command.own else at, command)
            else:
                flag = in_run(command, run)
                flags.append(flag)
                if isinstance(flag, Until):
                    untils.append(flag)
        if flags:
            driver.flags(at, flags)
        if forked:
            self._stream.wait_stream(self._beside)
        event = torch.cuda.Event()
        event.record(self._stream)
        self._watch.add(event, untils)
        return event

    def wait(self, done: torch.cuda.Event) -> None:
        """Lets the current stream wait for these."""
        torch.cuda.current_stream(self._device).wait_event(done)

    def drain(self) -> None:
        """Returns when all are done."""
        self._stream.synchronize()

    def close(self) -> None:
        """Returns when all are done; ends the watch."""
        self._stream.synchronize()
        self._watch.close()


Queue = ThreadQueue | StreamQueue

_WAIT, _WRITE, _AT_LEAST = 1, 2, 0  # CU_STREAM_MEM_OP_WAIT_VALUE_32, _WRITE_VALUE_32; CU_STREAM_WAIT_VALUE_GEQ


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, of 48 bytes, as its 32-bit waits and writes use it."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


class _Driver:
    """The three calls of CUDA's driver that torch does not give by address."""

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
            operation.flags = _AT_LEAST if waits else 0  # a write is behind a fence: all before it can be seen
        _succeeded(self._operate(stream, len(commands), operations, 0), "cuStreamBatchMemOp")

    def value(self, stream: torch.cuda.Stream, flag: int) -> int:
        """A flag's value now."""
        found = ctypes.c_uint32()
        _succeeded(self._fetch(ctypes.byref(found), flag, 4, stream.cuda_stream), "cuMemcpyDtoHAsync")
        stream.synchronize()
        return found.value


def _succeeded(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} failed with CUDA driver error {code}")


class _Watch:
    """A thread that looks whether what was enqueued ends in time, and ends the process where it does not."""

    _EVERY_S = 0.5

    def __init__(self, name: str, name_of: NameOf, timeout_s: float, driver: _Driver, device: torch.device) -> None:
        self._name, self._name_of, self._timeout_s = name, name_of, timeout_s
        self._driver, self._device = driver, device
        self._flying: deque[tuple[torch.cuda.Event, list[Until]]] = deque()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name=f"watch over copies of {name}", daemon=True).start()

    def add(self, event: torch.cuda.Event, untils: list[Until]) -> None:
        while self._flying and self._flying[0][0].query():
            self._flying.popleft()
        self._flying.append((event, untils))

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)
        oldest: torch.cuda.Event | None = None
        since_s = time.monotonic()
        while not self._closed.wait(self._EVERY_S):
            flying = next(iter(tuple(self._flying)), None)
            if flying is None or flying[0].query() or flying[0] is not oldest:
                oldest = None if flying is None else flying[0]
                since_s = time.monotonic()
                continue
            if time.monotonic() - since_s > self._timeout_s:
                missing = next(
                    (each for each in flying[1] if not reached(self._driver.value(stream, each.flag), each.value)), None
                )
                if missing is None:  # it waits for compute of this rank, which has its own reasons
                    since_s = time.monotonic()
                    continue
                error = lost(self._name, self._name_of(missing.peer), missing, self._timeout_s)
                print(f"overlapc: {error}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGABRT)


def queue_on(device: torch.device, name: str, name_of: NameOf, timeout_s: float) -> Queue:
    """The queue for ranks on devices of this type."""
    if device.type == "cpu":
        return ThreadQueue(name, name_of, timeout_s)
    return StreamQueue(name, name_of, timeout_s, device)


def unsupported(device: torch.device) -> str | None:
    """Reason why there can be no queue for this device here; None where there can."""
    if device.type == "cpu":
        import platform

        machine = platform.machine().lower()
        ordered = machine in ("x86_64", "amd64")  # data is seen before the flag that is stored after it
        return None if ordered else f"copies on a CPU rely on the order of stores of x86-64, not of {machine}"
    if device.type != "cuda":
        return f"no copies on {device.type}"
    try:
        from torch.distributed import _symmetric_memory as found
    except ImportError:
        return "this torch has no symmetric memory"
    needs: Any = ("empty", "rendezvous")
    return None if all(hasattr(found, name) for name in needs) else "this torch has no symmetric memory"
