"""A process group's pool: its symmetric memory, its queue, and the number of its last collective.

All graphs that communicate over a group share its pool, one after the other. The pool grows while a graph is compiled,
after all ranks have exchanged their sizes and with nothing in flight, and is freed with the last graph that holds it.
"""

from __future__ import annotations

import json
import math
import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from overlapc.errors import CompileError, NoSharedMemory, OverlapcError, PeerLost
from overlapc.runtime.copies import commands
from overlapc.runtime.copies.command_queues import Queue, queue_on
from overlapc.runtime.copies.commands import Command, Given, Run, Turn
from overlapc.runtime.copies.layout import Layout
from overlapc.runtime.copies.shared_memory import Memory, Offer, offer

Exchange = Callable[[str, str], Sequence[str]]
"""(stage, this rank's text) -> the texts of all ranks that compile this graph, in order of rank; may raise
RanksDisagree."""


class Pool:
    """The pool of one group on one device, made by `open_pools`."""

    def __init__(self, wanted: Wanted, device: torch.device, cache_dir: Path) -> None:
        group, name, ranks = wanted.group, wanted.name, wanted.ranks
        self.group = group  # torch's name of the group, which may differ between ranks
        self.name = name  # equal on all ranks
        self.ranks = ranks
        self.rank = ranks.index(dist.get_rank())
        self.device = device
        self.number = 0  # of the last collective of the graph that was started last
        self.released = 0  # the number of that graph's last release
        self.held = 0  # number of collectives whose memory a running graph uses
        self.failed = False  # a graph failed within a run: ranks may have started different collectives
        self.abandoned: list[Any] = []  # what collectives in flight then read and write, which may happen yet
        self.memory: Memory | None = None
        self.views: weakref.WeakKeyDictionary[GraphCopies, _Views] = weakref.WeakKeyDictionary()  # of this memory
        self.token = ""  # identifies the memory: equal on all ranks that mapped each other's
        self.queue: Queue = queue_on(
            device, f"@{name}", lambda rank: f"rank {ranks[rank]}", timeout_s(group), cache_dir
        )
        weakref.finalize(self, self.queue.close).atexit = False  # at exit it would wait for peers that may be gone

    @property
    def bytes(self) -> int:
        """The size of this rank's memory; 0 before it has any."""
        return 0 if self.memory is None else self.memory.bytes

    def replaced(self, memory: Memory, token: str) -> None:
        """Switch to new memory, whose flags are at 0. Nothing may be in flight on any rank."""
        self.memory, self.token = memory, token
        self.views.clear()
        self.number = self.released = 0
        self.failed = False
        self.abandoned.clear()


_pools: weakref.WeakValueDictionary[tuple[str, torch.device], Pool] = weakref.WeakValueDictionary()


def pools_bytes() -> int:
    """Return the total memory of this rank's pools; on a GPU torch's allocator does not count it."""
    return sum(pool.bytes for pool in _pools.values())


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a graph needs from a group's pool."""

    group: str  # torch's name
    name: str
    ranks: tuple[int, ...]
    bytes: int
    layout: str  # the layout of the graph's collectives, as text


def open_pools(
    wanted: Sequence[Wanted], device: torch.device, all_ranks: Sequence[int], exchange: Exchange, cache_dir: Path
) -> dict[str, Pool]:
    """Return pools of at least these bytes, by name. Collective: all of `all_ranks`, which compile this graph, call it.

    cache_dir: where code that the pools need is built.

    Either all ranks of a group allocate new memory or none does, whatever each still has from earlier graphs. If one
    rank cannot allocate, all raise NoSharedMemory and pools stay as they were. Raises CompileError if ranks of a group
    would lay out the memory differently.
    """
    pools = {request.name: _pool(request, device, cache_dir) for request in wanted}
    for pool in pools.values():
        pool.queue.drain()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    own = {
        request.name: {
            "has": [pool.token, pool.bytes, pool.failed],
            "layout": [request.bytes, request.layout],
            "held": pool.held > 0,
        }
        for request, pool in zip(wanted, pools.values(), strict=True)
    }
    answers = map(json.loads, exchange("pools for copies", json.dumps(own)))
    states = dict(zip(all_ranks, answers, strict=True))  # rank -> what it sent as `own`
    for request in wanted:
        name = request.name
        busy = next((rank for rank in request.ranks if states[rank][name]["held"]), None)
        if busy is not None:
            raise NoSharedMemory(
                f"@{name}: cannot set up copies for this graph while rank {busy} still runs another graph over the same"
                " shared memory"
            )
        other = next((rank for rank in request.ranks if states[rank][name]["layout"] != own[name]["layout"]), None)
        if other is not None:
            raise CompileError(
                f"@{name}: rank {other} lays out memory for copies differently from this rank"
                '\nhint: options={"transport": "nccl"} needs no shared memory; please report this'
            )
    offers: dict[str, Offer] = {}
    memories: dict[str, tuple[Memory, str]] = {}
    failure = ""
    try:
        try:
            for request in wanted:
                name = request.name
                memory_states = [states[rank][name]["has"] for rank in request.ranks]
                equal = all(state == memory_states[0] for state in memory_states)
                if not equal or memory_states[0][1] < request.bytes or pools[name].failed:
                    offers[name] = offer(request.bytes, device)
        except NoSharedMemory as error:
            failure = str(error)
        # From here on nothing is in flight on any rank, and all ranks have their new memory, or all raise.
        own_texts = {name: [own_offer.text, secrets.token_hex(8)] for name, own_offer in offers.items()}
        texts = _exchanged("memory for copies", failure, own_texts, all_ranks, exchange)
        texts_by_rank = dict(zip(all_ranks, texts, strict=True))
        try:
            for name, own_offer in offers.items():
                pool = pools[name]
                of_group = [texts_by_rank[rank][name] for rank in pool.ranks]
                memory = own_offer.joined(pool.rank, [text for text, _ in of_group], pool.group)
                memories[name] = memory, str(of_group)
        except (OSError, RuntimeError) as error:
            failure = f"the memory of other ranks cannot be reached: {error}"
        _exchanged("copies can start", failure, {}, all_ranks, exchange)  # all have mapped all memory: names can go
    finally:
        for own_offer in offers.values():
            own_offer.withdraw()
    for name, (memory, token) in memories.items():
        pools[name].replaced(memory, token)
    return pools


def _exchanged(stage: str, failure: str, value: Any, ranks: Sequence[int], exchange: Exchange) -> list[Any]:
    """Exchange `value` with all ranks and return theirs, in order; raise NoSharedMemory if one reports a failure.

    failure: this rank's own; "" for none.
    """
    answers = [json.loads(text) for text in exchange(stage, json.dumps([failure, value]))]
    for rank, (failed, _) in zip(ranks, answers, strict=True):
        if failed:
            raise NoSharedMemory(f"rank {rank}: {failed}")
    return [answer for _, answer in answers]


def reusable_pools(wanted: Sequence[Wanted], device: torch.device) -> dict[str, Pool] | None:
    """Return the open pools by name; None if one is not open, is too small, or has failed."""
    pools = {}
    for request in wanted:
        pool = _pools.get((request.group, device))
        if pool is None or pool.ranks != request.ranks or pool.bytes < request.bytes or pool.failed:
            return None
        pools[request.name] = pool
    return pools


def _pool(wanted: Wanted, device: torch.device, cache_dir: Path) -> Pool:
    key = (wanted.group, device)
    pool = _pools.get(key)
    if pool is None or pool.ranks != wanted.ranks:
        pool = _pools[key] = Pool(wanted, device, cache_dir)
    return pool


def timeout_s(group: str) -> float:
    """Return how long a rank waits for another in a collective: the timeout of the process group."""
    process_group: Any = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    backends = [process_group._get_backend(device) for device in process_group._device_types]
    options = [backend.options for backend in backends if backend.options is not None]  # torch's fake backend has none
    limits = [option._timeout for option in options]
    return float(max(limits, default=distributed_c10d.default_pg_timeout).total_seconds())


class Form(Enum):
    """How copies perform a collective, and where its results lie."""

    GATHERED = "gathered"  # the shards of all ranks, pushed into the pool
    EXCHANGED = "exchanged"  # the parts for this rank, pushed into the pool
    FROM_OTHERS = "from others"  # the same without this rank's own part, which is read at its original address
    PULLED = "pulled"  # the shards of all ranks, in memory that may outlive the graph
    TAKEN_OUT = "taken out"  # the parts for this rank, in memory that may outlive the graph

    @property
    def in_pool(self) -> bool:
        """Whether results lie in the pool until they are released."""
        return self not in (Form.PULLED, Form.TAKEN_OUT)


_PUSHED = {
    Form.GATHERED: commands.gather,
    Form.EXCHANGED: commands.exchange,
    Form.FROM_OTHERS: commands.exchange_with_others,
}


@dataclass(frozen=True, slots=True)
class StoredCopies:
    """The cached description of a graph's copies over one group, from which another process can reopen them."""

    group: str  # the pool's name
    process_group: str  # torch's name of the group; it and its ranks are part of the cache keys of graphs and steps
    ranks: tuple[int, ...]
    device: torch.device
    layout: Layout
    forms: tuple[str, ...]
    blocks: tuple[int, ...]

    @property
    def wanted(self) -> Wanted:
        """What these copies need from the group's pool."""
        return Wanted(self.process_group, self.group, self.ranks, self.layout.bytes, str(self.layout))


@dataclass
class _Views:
    """A graph's tensors in a pool's memory, and the commands that use them."""

    results: dict[int, list[Tensor]] = field(default_factory=dict)  # by collective
    shards: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by collective and position of the tensor
    # By collective: its commands as prepared by the queue, and the addresses outside of the pool that they are for,
    # which seldom change.
    commands: dict[int, tuple[list[int], Any]] = field(default_factory=dict)


class GraphCopies:
    """A graph's collectives on one pool; generated code starts, waits for and releases them by index.

    blocks: the number of blocks in the tensors of each collective; see `commands`.
    """

    def __init__(self, pool: Pool, layout: Layout, forms: Sequence[Form], blocks: Sequence[int] | None = None) -> None:
        self.pool = pool
        self.layout = layout
        self.forms = tuple(forms)
        self.blocks = (1,) * len(self.forms) if blocks is None else tuple(blocks)
        self._base = 0  # the number of the first collective in the current run
        self._released = 0  # the number of the first release in the current run
        self._early_shards: set[int] = set()  # collectives that have not started, but have a shard in the pool
        self._in_flight: dict[int, tuple[Any, Sequence[Tensor]]] = {}
        self._done = len(forms)  # number of collectives in the current run whose memory is free again

    @property
    def stored(self) -> StoredCopies:
        """The description from which `reopened` makes these copies in another process."""
        pool, forms = self.pool, tuple(form.value for form in self.forms)
        return StoredCopies(pool.name, pool.group, pool.ranks, pool.device, self.layout, forms, self.blocks)

    @classmethod
    def reopened(cls, stored: StoredCopies, pool: Pool) -> GraphCopies:
        """Return the copies that `stored` describes, on a pool of this process."""
        return cls(pool, stored.layout, [Form(name) for name in stored.forms], stored.blocks)

    def shard(self, index: int, at: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory in the slot for this rank's shard of the `at`-th tensor that collective `index` gathers: its
        place in the result, or, where peers fetch it, the whole slot.
        """
        self._begin()
        if index not in self._early_shards:
            self._early_shards.add(index)
            self.pool.held += 1
        views = self._views()
        shard = views.shards.get((index, at))
        if shard is None:
            slot = self.layout.slots[self.layout.begins[index].tensors[at]]
            part_bytes = math.prod(size) * dtype.itemsize
            before_bytes = self.pool.rank * part_bytes if self.forms[index].in_pool else 0
            there = self._bytes_at(slot.offset + before_bytes, part_bytes, dtype)
            shard = views.shards[index, at] = there.as_strided(size, stride)
        return shard

    def start(self, index: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Start collective `index`; results may be read after `wait` and, if they lie in the pool, until `release`.

        Raises PeerLost if a run on this pool has failed since it was opened, and OverlapcError while another graph runs
        on it.
        """
        pool = self.pool
        assert pool.memory is not None
        self._begin()
        form = self.forms[index]
        given = [tensor.contiguous() for tensor in tensors]
        views = self._views()
        if form.in_pool:
            results = views.results.get(index) or self._make_results(index, given)
            addresses = [tensor.data_ptr() for tensor in given]
        else:
            results = [tensor.new_empty(_result_shape(form, tensor, len(pool.ranks))) for tensor in given]
            addresses = [tensor.data_ptr() for tensor in (*given, *results)]
        known = views.commands.get(index)
        if known is None or known[0] != addresses:
            prepared: Any = pool.queue.prepared(self._commands(index, given, results))
            known = views.commands[index] = addresses, prepared
        # Hold the tensors that are read and written: their memory must not be freed before `wait`.
        self._in_flight[index] = pool.queue.run(known[1], Run(self._base, self._released)), (*given, *results)
        if index in self._early_shards:
            self._early_shards.discard(index)
        else:
            pool.held += 1
        return results

    def events_in_trace(self, index: int) -> int:
        """Return how many events of collective `index` a profiler shows: on GPUs each copy to or from another rank."""
        if self.pool.device.type == "cpu":
            return 1
        return len(self.layout.begins[index].tensors) * self.blocks[index] * (len(self.pool.ranks) - 1)

    def _commands(self, index: int, given: Sequence[Tensor], results: Sequence[Tensor]) -> list[Command]:
        """Return this rank's commands for a collective of these tensors."""
        assert self.pool.memory is not None
        at, begin, form = self.pool.memory.places, self.layout.begins[index], self.forms[index]
        turn = Turn(index, self._slots(index), begin.settled, begin.needed)
        blocks = self.blocks[index]
        moved = [Given(tensor.data_ptr(), tensor.numel() * tensor.element_size(), blocks) for tensor in given]
        if form.in_pool:
            return list(_PUSHED[form](at, turn, moved))
        run = commands.pulled_gather if form is Form.PULLED else commands.exchange_taken_out
        return list(run(at, turn, moved, [result.data_ptr() for result in results]))

    def _slots(self, index: int) -> tuple[int, ...]:
        return tuple(self.layout.slots[tensor].offset for tensor in self.layout.begins[index].tensors)

    def _views(self) -> _Views:
        """Return this graph's views of the pool's current memory; sizes are static, so all runs share them."""
        views = self.pool.views.get(self)
        if views is None:
            views = self.pool.views[self] = _Views()
        return views

    def _make_results(self, index: int, given: Sequence[Tensor]) -> list[Tensor]:
        results = []
        for slot, tensor in zip(self._slots(index), given, strict=True):
            shape = _result_shape(self.forms[index], tensor, len(self.pool.ranks))
            results.append(self._bytes_at(slot, math.prod(shape) * tensor.element_size(), tensor.dtype).view(shape))
        self._views().results[index] = results
        return results

    def _bytes_at(self, offset: int, size_bytes: int, dtype: torch.dtype) -> Tensor:
        """Return a piece of this rank's memory as a tensor of one dim."""
        assert self.pool.memory is not None
        return self.pool.memory.own[offset : offset + size_bytes].view(dtype)

    def _begin(self) -> None:
        """Begin a run of the graph unless one is going on; its numbers follow those of the pool's last run.

        Raises PeerLost if a run on this pool failed, and OverlapcError while another graph runs on it.
        """
        if self._done < len(self.forms):
            return
        pool = self.pool
        if pool.failed:
            raise PeerLost(
                f"@{pool.name}: a step failed on this rank between its copies, so ranks may have started different"
                " collectives\nhint: call torch._dynamo.reset() on all ranks; the next step is compiled with new memory"
            )
        if pool.held:
            raise OverlapcError(
                f"@{pool.name}: two compiled graphs run at once and communicate by copies over the same process group"
                '\nhint: use a separate process group for one of them, or options={"transport": "nccl"}'
            )
        self._done = 0
        self._base, self._released = pool.number + 1, pool.released + 1
        pool.number += len(self.layout.begins)
        pool.released += len(self.layout.slots)  # each is released once

    def wait(self, index: int) -> None:
        """Make compute wait until the results are there."""
        done, _ = self._in_flight[index]
        self.pool.queue.wait(done)
        del self._in_flight[index]
        if not self.forms[index].in_pool:
            self.release(index)

    def finish(self, index: int) -> Any:
        """End collective `index`, whose results are not read; return the future or event for the queue's `wait`."""
        done, _ = self._in_flight.pop(index)
        self.release(index)
        return done

    def release(self, index: int) -> None:
        """Free the pool memory of collective `index`: no kernel launched from now on reads it."""
        self.pool.held -= 1
        self._done += 1

    def failed(self) -> None:
        """End a run that raised an exception."""
        self.pool.failed = self.pool.failed or self._done < len(self.forms)  # peers wait for the rest of this run
        self.pool.held = 0
        self._done = len(self.forms)
        self.pool.abandoned += self._in_flight.values()
        self._in_flight.clear()
        self._early_shards.clear()


def _result_shape(form: Form, tensor: Tensor, ranks: int) -> tuple[int, ...]:
    """Return the shape of a collective's result for an input tensor."""
    if form in (Form.GATHERED, Form.PULLED):
        return (ranks * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else (ranks,)
    rows = tensor.shape[0] // ranks * (ranks - 1) if form is Form.FROM_OTHERS else tensor.shape[0]
    return (rows, *tensor.shape[1:])
