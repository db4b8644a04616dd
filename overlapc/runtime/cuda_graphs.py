"""Parts of a compiled graph as CUDA graphs: the first call runs as it is, the second is captured, later ones replay.

A captured part works on fixed addresses. An argument that had the same address in the first and the second call is read
there; any other is copied into a buffer of the part before a replay (and back, if the part changes it). When
an argument that was used in place has moved, the part is captured again and copies that one from then on: each argument
costs at most one recapture. What parts make stays at one address, in a memory pool that the parts of a graph share,
and the next call overwrites it; so what the graph returns is copied out of there (`Parts.copied`).

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
    """Records what a function launches. Its parts are replayed in the order in which they were recorded."""

    def busy(self) -> bool:
        """Whether a CUDA graph outside of overlapc is being captured: everything then runs into that capture."""

    def record(self, function: Function, given: Sequence[Tensor]) -> tuple[Callable[[], None], tuple[Any, ...]]:
        """(what calls `function` on this very memory again, the results that it fills), without any effect now."""

    def restart(self) -> None:
        """Drops everything that was recorded."""


class CudaGraphs:
    """Records into CUDA graphs on the current device, with one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def busy(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, function: Function, given: Sequence[Tensor]) -> tuple[Callable[[], None], tuple[Any, ...]]:
        """A capture on a stream of its own. Other threads (NCCL's watchdog) may use CUDA meanwhile."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = _stream(torch.cuda.current_device())
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            results = function(list(given))
        return graph.replay, results

    def restart(self) -> None:
        """The next capture opens a pool: torch gives a pool up with the last graph that uses it."""
        torch.cuda.synchronize()
        self._pool = None


@lru_cache(None)
def _stream(device: int) -> torch.cuda.Stream:
    """The stream of this device's captures; one for all, because each stream gets a cuBLAS workspace."""
    return torch.cuda.Stream(device)


_all_parts: WeakSet[Parts] = WeakSet()


def release_cuda_graphs() -> None:
    """Drops all CUDA graphs that overlapc captured in this process; the next calls capture again.

    NCCL destroys no communicator while a CUDA graph holds launches of it: `destroy_process_group` would wait forever.
    """
    for parts in tuple(_all_parts):
        parts.forget(0)


@cache
def _release_with_groups() -> None:
    """Has `torch.distributed.destroy_process_group` release them first: torch has no hook before it destroys."""
    destroy = dist.destroy_process_group

    @wraps(destroy)
    def release_and_destroy(*args: Any, **options: Any) -> None:
        release_cuda_graphs()
        destroy(*args, **options)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = release_and_destroy


class Parts:
    """The captured parts of one compiled graph, in the order in which they run."""

    def __init__(self, graph: str, recorder: Recorder | None = None) -> None:
        self.graph = graph
        self.recorder = recorder or CudaGraphs()
        self.parts: list[_Part] = []
        _all_parts.add(self)

    def part(self, inner: Iterable[int] = (), written: Iterable[int] = ()) -> Callable[[Function], Function]:
        """Makes a part of a function that empties its list of arguments.

        inner: arguments that earlier parts made. written: arguments that it changes.
        """

        def make(function: Function) -> Function:
            self.parts.append(_Part(function, self, len(self.parts), frozenset(inner), frozenset(written)))
            return self.parts[-1]

        return make

    def copied(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Copies in memory of their own, which later calls do not overwrite."""
        with torch.no_grad():
            buffers = [_Buffer.like(tensor) for tensor in tensors]
            _copy([buffer.flat for buffer in buffers], tensors)
        return tuple(buffer.tensor for buffer in buffers)

    def forget(self, number: int) -> None:
        """Drops the recordings of this part and of all later parts.

        A new recording of it may put its results where parts behind it, recorded before, have their temporaries.
        """
        for part in self.parts[number:]:
            part.recording = None
        if all(part.recording is None for part in self.parts):
            self.recorder.restart()


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Memory for a tensor, from its first element to its last; `flat` is all of it."""

    flat: Tensor
    tensor: Tensor

    @classmethod
    def like(cls, given: Tensor) -> _Buffer:
        flat = torch.empty_like(_flat(given), memory_format=torch.contiguous_format)
        return cls(flat, flat.as_strided(given.size(), given.stride()))


def _flat(tensor: Tensor) -> Tensor:
    """All elements from the first to the last that the tensor reaches, each once."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    return tensor.detach().as_strided((reach if tensor.numel() else 0,), (1,))


def _copy(flats: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    if flats:
        torch._foreach_copy_(list(flats), [_flat(tensor) for tensor in given])


@dataclass(frozen=True, slots=True)
class _Recording:
    """A recorded part: what it reads in place, and what is copied to where it reads it (position -> buffer)."""

    replay: Callable[[], None]
    results: tuple[Any, ...]
    placed: dict[int, int]  # position -> address
    buffers: dict[int, _Buffer]
    written: tuple[int, ...]  # positions of buffers that the part changes

    def moved(self, args: Sequence[Tensor]) -> bool:
        """Whether an argument that is read in place lies elsewhere, or a copied one has another layout."""
        return any(args[at].data_ptr() != address for at, address in self.placed.items()) or any(
            args[at].size() != buffer.tensor.size() or args[at].stride() != buffer.tensor.stride()
            for at, buffer in self.buffers.items()
        )

    def run(self, args: list[Tensor]) -> tuple[Any, ...]:
        with torch.no_grad():
            _copy([buffer.flat for buffer in self.buffers.values()], [args[at] for at in self.buffers])
            self.replay()
            for at in self.written:
                _flat(args[at]).copy_(self.buffers[at].flat)
        args.clear()
        return self.results


class _Part:
    """One part, called with a list of its arguments, which it empties."""

    def __init__(
        self, function: Function, parts: Parts, number: int, inner: frozenset[int], written: frozenset[int]
    ) -> None:
        self.function = function
        self.parts = parts
        self.number = number
        self.inner = inner
        self.written = written
        self.addresses: list[int] | None = None  # of the arguments, in the first call or when last recorded
        self.moving: set[int] = set()  # arguments that are copied
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
                'hint: options={"cuda_graphs": False}; please report the op that cannot be captured'
            ) from error
        placed = {at: address for at, address in enumerate(self.addresses) if at not in buffers}
        return _Recording(replay, results, placed, buffers, tuple(sorted(self.written & set(buffers))))
