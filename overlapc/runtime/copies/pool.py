"""A process group's pool: its symmetric memory, its queue, and the number of its last collective.

All graphs that communicate over a group share its pool, one after the other. It grows while a graph is compiled, when
all ranks have met and nothing is in flight, and goes with the last graph that holds it.
"""

from __future__ import annotations

import json
import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from overlapc.errors import CompileError
from overlapc.runtime.copies import commands
from overlapc.runtime.copies.commands import Piece, Turn
from overlapc.runtime.copies.layout import Slot
from overlapc.runtime.copies.memory import Memory, Offer, offer
from overlapc.runtime.copies.queues import Queue, queue_on

Tell = Callable[[str, str], Sequence[str]]
"""(stage, this rank's text) -> the texts of all ranks that compile this graph, in order of rank, or RanksDisagree."""


class Pool:
    """What `open_pools` made for one group on one device."""

    def __init__(self, group: str, name: str, ranks: tuple[int, ...], device: torch.device, timeout_s: float) -> None:
        self.group = group  # torch's name of it, which may differ between ranks
        self.name = name  # equal on all ranks
        self.ranks = ranks
        self.rank = ranks.index(dist.get_rank())
        self.device = device
        self.number = 0  # of the collective that was started last
        self.held = 0  # collectives whose memory is in use by a graph that runs
        self.memory: Memory | None = None
        self.token = ""  # of the memory: equal on all ranks that mapped each other's
        self.queue: Queue = queue_on(device, f"@{name}", lambda rank: f"rank {ranks[rank]}", timeout_s)
        weakref.finalize(self, self.queue.close).atexit = False  # which would wait for peers that may be gone

    @property
    def bytes(self) -> int:
        """Of this rank's memory."""
        return 0 if self.memory is None else self.memory.bytes

    def replaced(self, memory: Memory, token: str) -> None:
        """The pool on new memory, whose flags are at 0. Nothing may be in flight on any rank."""
        self.memory, self.token = memory, token
        self.number = 0


_pools: weakref.WeakValueDictionary[tuple[str, torch.device], Pool] = weakref.WeakValueDictionary()


def pools_bytes() -> int:
    """Memory of this rank that all its pools have together; torch's allocator does not count that of a GPU."""
    return sum(pool.bytes for pool in _pools.values())


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a graph needs of a group's pool."""

    group: str  # torch's name
    name: str
    ranks: tuple[int, ...]
    bytes: int


def open_pools(wanted: Sequence[Wanted], device: torch.device, all_ranks: Sequence[int], tell: Tell) -> dict[str, Pool]:
    """By name, pools of at least these bytes. `all_ranks` compile this graph; all call this, in the same order.

    New memory is made by all ranks of a group or by none, whatever each of them still has of earlier graphs.
    """
    found = {each.name: _pool(each, device) for each in wanted}
    for pool in found.values():
        pool.queue.drain()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    mine = {name: [pool.token, pool.bytes] for name, pool in found.items()}
    told = dict(zip(all_ranks, map(json.loads, tell("pools for copies", json.dumps(mine))), strict=True))
    offers: dict[str, Offer] = {}
    try:
        for each in wanted:
            has = [told[rank].get(each.name) for rank in each.ranks]
            if any(state != has[0] for state in has) or has[0][1] < each.bytes:
                offers[each.name] = offer(each.bytes, device)
        # Nothing is in flight on any rank, and all have their new memory, or none goes on.
        texts = {name: [made.text, secrets.token_hex(8)] for name, made in offers.items()}
        told = dict(zip(all_ranks, map(json.loads, tell("memory for copies", json.dumps(texts))), strict=True))
        for name, made in offers.items():
            pool = found[name]
            of_group = [told[rank][name] for rank in pool.ranks]
            pool.replaced(made.joined(pool.rank, [text for text, _ in of_group], pool.group), str(of_group))
        tell("copies can start", "")  # all have mapped all memory: no name is needed any more
    finally:
        for made in offers.values():
            made.withdraw()
    return found


def _pool(wanted: Wanted, device: torch.device) -> Pool:
    key = (wanted.group, device)
    pool = _pools.get(key)
    if pool is None or pool.ranks != wanted.ranks:
        pool = _pools[key] = Pool(wanted.group, wanted.name, wanted.ranks, device, _timeout_s(wanted.group))
    if pool.held:
        raise CompileError(f"@{wanted.name}: a graph is compiled while another one's copies are in flight")
    return pool


def _timeout_s(group: str) -> float:
    """How long a rank waits for another in a collective: the timeout of the process group."""
    found: Any = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    backends = [found._get_backend(device) for device in found._device_types]
    return float(max(each.options._timeout.total_seconds() for each in backends))


class GraphCopies:
    """A graph's collectives on one pool, as its generated code starts, waits for and releases them by their index."""

    def __init__(self, pool: Pool, slots: Sequence[Slot], kinds: Sequence[str]) -> None:
        """kinds: of each collective, "all_gather" or "all_to_all"."""
        self.pool = pool
        self.slots = tuple(slots)
        self.kinds = tuple(kinds)
        self._base = 0  # the number of the first collective of the present run
        self._flying: dict[int, tuple[Any, Sequence[Tensor]]] = {}

    def start(self, index: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Puts one in flight; its results may be read after `wait` and, of an exchange, until `release`."""
        pool = self.pool
        assert pool.memory is not None
        if index == 0:
            self._base = pool.number + 1
            self._flying.clear()  # of a run that failed
            pool.held = 0
        slot = self.slots[index]
        pool.number = self._base + index
        turn = Turn(pool.number, slot.offset, self._base + slot.settled, self._base + slot.needed)
        given = [tensor.contiguous() for tensor in tensors]
        pieces = [Piece(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in given]
        at = pool.memory.places
        if self.kinds[index] == "all_gather":
            results = [tensor.new_empty(_gathered(tensor, len(at.bases))) for tensor in given]
            todo = commands.gather(at, turn, pieces, [result.data_ptr() for result in results])
        else:
            offsets = commands.offsets_in(slot.offset, [piece.bytes for piece in pieces])
            pairs = zip(given, pieces, offsets, strict=True)
            results = [
                pool.memory.own[offset : offset + piece.bytes].view(tensor.dtype).view(tensor.shape)
                for tensor, piece, offset in pairs
            ]
            todo = commands.exchange(at, turn, pieces)
        self._flying[index] = pool.queue.run(todo), given  # which must not be given back before they are read
        pool.held += 1
        return results

    def wait(self, index: int) -> None:
        """Blocks compute until the results are there."""
        done, _ = self._flying[index]
        self.pool.queue.wait(done)
        del self._flying[index]
        if self.kinds[index] == "all_gather":
            self.pool.held -= 1

    def release(self, index: int) -> None:
        """Nothing launched from now on reads the results of an exchange."""
        self.pool.held -= 1


def _gathered(tensor: Tensor, ranks: int) -> tuple[int, ...]:
    return (ranks * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else (ranks,)
