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
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch

from overlapc.errors import PeerLost, ToolchainError
from overlapc.runtime import marks
from overlapc.runtime.copies.commands import Command, Copy, Post, Run, Until, in_run
from overlapc.runtime.native_launcher import DRIVER
from overlapc.runtime.native_module import native_module

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

    def prepared(self, commands: Sequence[Command]) -> Sequence[Command]:
        """Return the commands in the form that `run` takes; it may run them any number of times."""
        return commands

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
                with marks.copying(self._name):
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

    def __init__(self, name: str, name_of: NameOf, timeout_s: float, device: torch.device, cache_dir: Path) -> None:
        """Raises ToolchainError, ImportError or OSError where `unsupported` gives a reason."""
        native = _native(cache_dir)
        assert device.index is not None
        self._device_index = device.index
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._local_copies = torch.cuda.Stream(device, priority=-1)
        self._streams = native.CopyStream(self._stream.cuda_stream, self._local_copies.cuda_stream)
        self._watch = _Watch(name, name_of, timeout_s, device)

    def prepared(self, commands: Sequence[Command]) -> PackedCommands:
        """Return the commands in the form that `run` takes; it may run them any number of times."""
        return PackedCommands.of(commands)

    def run(self, commands: PackedCommands, run: Run) -> Any:
        """Enqueue commands after earlier ones and after the current stream's work; return their end, for `wait`."""
        done = self._streams.run(self._current(), commands.packed, run.collective, run.release)
        self._watch.add(done, commands, run)
        return done

    def wait(self, done: Any) -> None:
        """Make the current stream wait for the commands of a `run`."""
        done.wait(self._current())

    def _current(self) -> int:
        """Return the current stream of the device."""
        return torch._C._cuda_getCurrentRawStream(self._device_index)

    def drain(self) -> None:
        """Block until all commands are done."""
        self._stream.synchronize()

    def close(self) -> None:
        """Block until all commands are done, and end the watchdog thread."""
        self._stream.synchronize()
        self._watch.close()


Queue = ThreadQueue | StreamQueue


class PackedCommands(NamedTuple):
    """Commands for `copy_stream.c`."""

    packed: bytes  # its array of `Command`
    flags: tuple[Until, ...]  # those that the commands wait for

    @classmethod
    def of(cls, commands: Sequence[Command]) -> PackedCommands:
        """Pack commands, all of one collective."""
        rows = b"".join(_COMMAND.pack(*_row(command)) for command in commands)
        return cls(rows, tuple(command for command in commands if isinstance(command, Until)))


_COMMAND = struct.Struct("=qQQqq")  # `Command` of copy_stream.c
_COPY, _OWN_COPY, _POST, _UNTIL = range(4)


def _row(command: Command) -> tuple[int, int, int, int, int]:
    if isinstance(command, Copy):
        return _OWN_COPY if command.own else _COPY, command.target, command.source, command.bytes, 0
    return _UNTIL if isinstance(command, Until) else _POST, command.flag, 0, command.value, command.release


def _native(cache_dir: Path, driver: str = DRIVER) -> Any:
    """Return the module `copy_stream.c`, which uses this CUDA driver."""
    module: Any = native_module("overlapc_copies", Path(__file__).with_name("copy_stream.c"), cache_dir)
    module.open_driver(driver)
    return module


class _Watch:
    """A watchdog thread that aborts the process if enqueued commands do not finish in time."""

    _EVERY_S = 0.5

    def __init__(self, name: str, name_of: NameOf, timeout_s: float, device: torch.device) -> None:
        self._name, self._name_of, self._timeout_s = name, name_of, timeout_s
        self._device = device
        self._in_flight: deque[tuple[Any, PackedCommands, Run]] = deque()  # the end of each `run` first
        self._closed = threading.Event()
        threading.Thread(target=self._run, name=f"watch over copies of {name}", daemon=True).start()

    def add(self, done: Any, commands: PackedCommands, run: Run) -> None:
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()
        self._in_flight.append((done, commands, run))

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)
        oldest: Any = None
        since_s = time.monotonic()
        while not self._closed.wait(self._EVERY_S):
            flying = next(iter(tuple(self._in_flight)), None)
            if flying is None or flying[0].query() or flying[0] is not oldest:
                oldest = None if flying is None else flying[0]
                since_s = time.monotonic()
                continue
            if time.monotonic() - since_s > self._timeout_s:
                _, commands, run = flying
                flags = (in_run(flag, run) for flag in commands.flags)
                missing = next((flag for flag in flags if not reached(_value(flag, stream), flag.value)), None)
                if missing is None:  # the queue waits for this rank's own compute, not for a peer
                    since_s = time.monotonic()
                    continue
                error = lost(self._name, self._name_of(missing.peer), missing, self._timeout_s)
                print(f"overlapc: {error}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGABRT)


def _value(flag: Until, stream: torch.cuda.Stream) -> int:
    """Return the current value of a flag."""
    found = ctypes.c_uint32()
    fetch = ctypes.CDLL(DRIVER).cuMemcpyDtoHAsync_v2
    fetch.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    if code := fetch(ctypes.byref(found), flag.flag, 4, stream.cuda_stream):
        raise RuntimeError(f"cuMemcpyDtoHAsync failed with CUDA driver error {code}")
    stream.synchronize()
    return found.value


def queue_on(device: torch.device, name: str, name_of: NameOf, timeout_s: float, cache_dir: Path) -> Queue:
    """Return a new queue for ranks on devices of this type.

    cache_dir: where `copy_stream.c` is built.
    """
    if device.type == "cpu":
        return ThreadQueue(name, name_of, timeout_s)
    return StreamQueue(name, name_of, timeout_s, device, cache_dir)


def unsupported(device: torch.device, cache_dir: Path) -> str | None:
    """Return why copies are not supported on this device and machine, or None if they are.

    cache_dir: where `copy_stream.c` is built.
    """
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
    if not all(hasattr(found, name) for name in needs):
        return "this torch has no symmetric memory"
    try:
        _native(cache_dir)
    except (ToolchainError, ImportError, OSError) as error:
        return f"the code that starts copies cannot be built or loaded: {error}".splitlines()[0]
    return None
