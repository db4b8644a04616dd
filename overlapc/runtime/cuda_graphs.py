"""Run parts of a compiled graph as CUDA graphs: the first call runs normally, the second is captured, later replayed.

A captured part works on fixed addresses. An argument that had the same address in the first and the second call is read
there; any other argument is copied into a buffer of the part before a replay (and back, if the part changes it). If an
argument that was used in place has moved, the part is captured again and copies that argument from then on: each
argument costs at most one recapture. Results of parts have fixed addresses in a memory pool that the parts of a graph
share, and the next call overwrites them; so the graph's results are copied out of the pool (`Parts.copied`).

`Recorder` is the interface to a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from overlapc.errors import OverlapcError
from overlapc.runtime.counters import count

Function = Callable[[list[Any]], tuple[Any, ...]]


class CaptureError(OverlapcError):
    """A part of a compiled graph could not be captured as a CUDA graph."""


class Recorder(Protocol):
    """Records what a function launches. Parts are replayed in the order in which they were recorded."""

    def busy(self) -> bool:
        """Whether a CUDA graph outside of overlapc is being captured; parts then run normally, into that capture."""

    def record(self, function: Function, given: Sequence[Tensor]) -> tuple[Callable[[], None], tuple[Any, ...]]:
        """Return (replay, results): `replay()` runs `function` again on the same memory. Recording computes nothing."""

    def restart(self) -> None:
        """Drop everything that was recorded."""


class CudaGraphs:
    """Records into CUDA graphs on the current device, with one memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None

    def busy(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, function: Function, given: Sequence[Tensor]) -> tuple[Callable[[], None], tuple[Any, ...]]:
        """Capture on a separate stream. Other threads (NCCL's watchdog) may use CUDA meanwhile."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = _stream(torch.cuda.current_device())
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            results = function(list(given))
        return graph.replay, results

    def restart(self) -> None:
        """Make the next capture open a new pool: torch frees a pool with the last graph that uses it."""
        torch.cuda.synchronize()
        self._pool = None


@lru_cache(None)
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream for captures on this device; only one, because each stream gets a cuBLAS workspace."""
    return torch.cuda.Stream(device)


_all_parts: WeakSet[Parts] = WeakSet()


def release_cuda_graphs() -> None:
    """Drop all CUDA graphs that overlapc captured in this process; the next calls capture again.

    NCCL does not destroy a communicator while a CUDA graph contains its launches: `destroy_process_group` would hang.
    """
    for parts in tuple(_all_parts):
        parts.forget(0)


@cache
def _release_with_groups() -> None:
    """Make process groups release CUDA graphs before they shut down; torch has no hook for that.

    The method is replaced, and not `destroy_process_group`, which scripts may have imported before.
    """
    shutdown = dist.ProcessGroup.shutdown

    @wraps(shutdown)
    def release_and_shut_down(self: dist.ProcessGroup) -> None:
        release_cuda_graphs()
        shutdown(self)

    dist.ProcessGroup.shutdown = release_and_shut_down  # type: ignore[method-assign]


class Parts:
    """The captured parts of one compiled graph, in the order in which they run."""

    def __init__(self, graph: str, recorder: Recorder | None = None) -> None:
        self.graph = graph
        self.recorder = recorder or CudaGraphs()
        self.parts: list[_Part] = []
        _all_parts.add(self)

    def part(self, inner: Iterable[int] = (), written: Iterable[int] = ()) -> Callable[[Function], Function]:
        """Return a decorator that makes a part of a function, which must empty its list of arguments.

        inner: positions of arguments that earlier parts made. written: positions of arguments that the part changes.
        """

        def make(function: Function) -> Function:
            self.parts.append(_Part(function, self, len(self.parts), frozenset(inner), frozenset(written)))
            return self.parts[-1]

        return make

    def copied(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return copies in separate memory, which later calls do not overwrite."""
        with torch.no_grad():
            buffers = [_Buffer.like(tensor) for tensor in tensors]
            _copy([buffer.flat for buffer in buffers], tensors)
        return tuple(buffer.tensor for buffer in buffers)

    def forget(self, number: int) -> None:
        """Drop the recordings of part `number` and of all later parts.

        A new recording of the part may put its results where later parts, recorded before, have their temporaries.
        """
        for part in self.parts[number:]:
            part.recording = None
        if all(part.recording is None for part in self.parts):
            self.recorder.restart()


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Memory for a tensor, from its first element to its last; `flat` is all of that memory."""

    flat: Tensor
    tensor: Tensor

    @classmethod
    def like(cls, given: Tensor) -> _Buffer:
        flat = torch.empty_like(_flat(given), memory_format=torch.contiguous_format)
        return cls(flat, flat.as_strided(given.size(), given.stride()))


def _flat(tensor: Tensor) -> Tensor:
    """Return a view of all elements in memory from the tensor's first to its last, each once."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    return tensor.detach().as_strided((reach if tensor.numel() else 0,), (1,))


def _copy(flats: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    if flats:
        torch._foreach_copy_(list(flats), [_flat(tensor) for tensor in given])


@dataclass(frozen=True, slots=True)
class _Recording:
    """A recorded part, with the arguments that it reads in place and those that are copied into its buffers."""

    replay: Callable[[], None]
    results: tuple[Any, ...]
    placed: dict[int, int]  # position -> address
    buffers: dict[int, _Buffer]  # by position
    written: tuple[int, ...]  # positions of buffers that the part changes

    def moved(self, args: Sequence[Tensor]) -> bool:
        """Whether an argument that is read in place has another address, or a copied one has another layout."""
        return any(args[at].data_ptr() != address for at, address in self.placed.items()) or any(
            args[at].size() != buffer.tensor.size() or args[at].stride() != buffer.tensor.stride()
            for at, buffer in self.buffers.items()
        )

    def run(self, args: list[Tensor]) -> tuple[Any, ...]:
        with torch.no_grad():
            _copy([buffer.flat for buffer in self.buffers.values()], [args[at] for at in self.buffers])
            self.replay()
            for at in self.written:
                # Only the elements: other arguments may be in the gaps between them (columns of one tensor).
                args[at].detach().copy_(self.buffers[at].tensor)
        args.clear()
        return self.results


class _Part:
    """One part, a callable that takes a list of its arguments and empties the list."""

    def __init__(
        self, function: Function, parts: Parts, number: int, inner: frozenset[int], written: frozenset[int]
    ) -> None:
        self.function = function
        self.parts = parts
        self.number = number
        self.inner = inner
        self.written = written
        self.addresses: list[int] | None = None  # of the arguments, in the first call or when last recorded
        self.moving: set[int] = set()  # positions of arguments that are copied
        self.recording: _Recording | None = None

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        if self.parts.recorder.busy():
            return self.function(args)
        if self.addresses is None:
            self.addresses = [tensor.data_ptr() for tensor in args]
            return self.function(args)
        if self.recording is not None and self.recording.moved(args):
            self.parts.forget(self.number)
            count("cuda_graph_recaptures")
        if self.recording is None:
            if dist.is_available() and dist.is_initialized():
                _release_with_groups()
            self.recording = self._record(args, self.addresses)
            count("cuda_graph_captures")
        else:
            count("cuda_graph_replays")
        return self.recording.run(args)

    def _record(self, args: Sequence[Tensor], before: Sequence[int]) -> _Recording:
        self.addresses = [tensor.data_ptr() for tensor in args]
        pairs = enumerate(zip(self.addresses, before, strict=True))
        self.moving |= {at for at, (now, then) in pairs if now != then and at not in self.inner}
        buffers = {at: _Buffer.like(args[at]) for at in sorted(self.moving)}
        given = [buffers[at].tensor if at in buffers else tensor for at, tensor in enumerate(args)]
        try:
            replay, results = self.parts.recorder.record(self.function, given)
        except RuntimeError as error:
            raise CaptureError(
                f"part {self.number} of {self.parts.graph} could not be captured as a CUDA graph: {error}\n"
                'hint: use options={"cuda_graphs": False}, and please report the op that cannot be captured'
            ) from error
        placed = {at: address for at, address in enumerate(self.addresses) if at not in buffers}
        return _Recording(replay, results, placed, buffers, tuple(sorted(self.written & set(buffers))))
