"""Collectives by copies between real ranks: results equal gloo's, slots are reused, pools grow, and failed peers are
named."""

import gc
import multiprocessing
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlapc.errors import OverlapcError, PeerLost
from overlapc.runtime.copies import command_queues, commands
from overlapc.runtime.copies.layout import Event, Release, Start, Take, place
from overlapc.runtime.copies.pool import Form, GraphCopies, Pool, Wanted, open_pools, reusable_pools
from tests.ranks import values_on_ranks

CPU = torch.device("cpu")
GATHERED, EXCHANGED, PULLED, TAKEN_OUT = Form.GATHERED, Form.EXCHANGED, Form.PULLED, Form.TAKEN_OUT
FROM_OTHERS = Form.FROM_OTHERS


class Case(NamedTuple):
    """A collective of `tensors`, each of which consists of `blocks` blocks."""

    form: Form
    tensors: tuple[torch.Tensor, ...]
    blocks: int = 1


def exchange(stage: str, text: str) -> Sequence[str]:
    """Exchange a text with all ranks, as ranks do while they compile."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def pool_of(size_bytes: int, timeout_s: float | None = None) -> Pool:
    """Open a pool of all ranks."""
    ranks = tuple(range(dist.get_world_size()))
    wanted = Wanted(dist.group.WORLD.group_name, "dp", ranks, size_bytes, "")
    if timeout_s is None:
        return open_pools([wanted], CPU, ranks, exchange, Path())["dp"]
    with mock.patch("overlapc.runtime.copies.pool.timeout_s", return_value=timeout_s):
        return open_pools([wanted], CPU, ranks, exchange, Path())["dp"]


def made(pool: Pool | None, cases: Sequence[Case], ahead: int, timeout_s: float | None = None) -> GraphCopies:
    """Return the copies of a graph that waits for each collective `ahead` starts after its own start."""
    events: list[Event] = []
    taken: set[int] = set()
    numbers = iter(range(1000))
    brings: list[tuple[int, ...]] = []

    def release(index: int) -> None:
        events.extend(Release(tensor) for tensor in brings[index])

    def take(index: int) -> None:
        form, tensors, _ = cases[index]
        times = dist.get_world_size() if form is GATHERED else 1
        if index not in taken:
            taken.add(index)
            for tensor, given in zip(brings[index], tensors, strict=True):
                events.append(Take(tensor, times * given.numel() * given.element_size()))

    brings.extend(tuple(next(numbers) for _ in case.tensors) for case in cases)
    for index, case in enumerate(cases):
        if in_place(case):  # because `ran` writes shards into the pool before the start
            take(index)
    for index in range(len(cases)):
        take(index)
        events.append(Start(brings[index]))
        if index >= ahead:
            release(index - ahead)
    for index in range(max(0, len(cases) - ahead), len(cases)):
        release(index)
    layout = place(events)
    forms, blocks = [case.form for case in cases], [case.blocks for case in cases]
    return GraphCopies(pool or pool_of(layout.bytes, timeout_s), layout, forms, blocks)


def ran(copies: GraphCopies, cases: Sequence[Case], ahead: int) -> list[list[torch.Tensor]]:
    """Run the collectives as such a graph does, and return the results."""
    flying: dict[int, list[torch.Tensor]] = {}
    found = []

    def land(index: int) -> None:
        copies.wait(index)
        found.append([result.clone() for result in flying.pop(index)])
        if cases[index].form.in_pool:
            copies.release(index)

    shards: dict[int, list[torch.Tensor]] = {}
    for index, case in enumerate(cases):
        if in_place(case):
            shards[index] = put_in_place(copies, index, case.tensors)
    for index, case in enumerate(cases):
        flying[index] = copies.start(index, shards.get(index, case.tensors))
        if index >= ahead:
            land(index - ahead)
    for index in sorted(flying):
        land(index)
    return found


def in_place(case: Case) -> bool:
    """Whether shards are written into the pool before their gather starts: only a single block is contiguous there."""
    return case.form in (GATHERED, PULLED) and case.blocks == 1


def put_in_place(copies: GraphCopies, index: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Write the shards to their place in the pool, as kernels do, and return them."""
    there = [copies.shard(index, at, each.shape, each.stride(), each.dtype) for at, each in enumerate(tensors)]
    for place_of, each in zip(there, tensors, strict=True):
        place_of.copy_(each)
    return there


def by_gloo(case: Case) -> list[torch.Tensor]:
    """Return the results of the same collective by gloo."""
    form, tensors, blocks = case
    found = []
    for tensor in tensors:
        ranks = dist.get_world_size()
        exchanges = form in (EXCHANGED, FROM_OTHERS, TAKEN_OUT)
        result = tensor.new_empty((tensor.shape[0] * (1 if exchanges else ranks), *tensor.shape[1:]))
        if exchanges:
            parts = tensor.unflatten(0, (blocks, ranks, -1)).transpose(0, 1).flatten(0, 2)
            dist.all_to_all_single(result, parts.contiguous())
        else:
            dist.all_gather_into_tensor(result, tensor)
            result = result.unflatten(0, (ranks, blocks, -1)).transpose(0, 1).flatten(0, 2)
        if form is FROM_OTHERS:
            others = list(result.chunk(ranks))
            del others[dist.get_rank()]
            result = torch.cat(others)
        found.append(result)
    return found


def cases_of(step: int) -> list[Case]:
    """Return collectives with numbers that depend on rank and step, odd sizes and several dtypes."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    ranks = dist.get_world_size()

    def numbers(rows: int, *rest: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(rows, *rest, generator=generator).to(dtype)

    found = [
        (GATHERED, (numbers(3, 7, dtype=torch.bfloat16), numbers(5, dtype=torch.float32))),
        (EXCHANGED, (numbers(2 * ranks, 9, dtype=torch.bfloat16),)),
        (PULLED, (numbers(1000, dtype=torch.float32), numbers(7, 3, dtype=torch.bfloat16))),
        (EXCHANGED, (numbers(ranks, 333, dtype=torch.float32), numbers(3 * ranks, dtype=torch.bfloat16))),
        (TAKEN_OUT, (numbers(ranks, 1000, dtype=torch.bfloat16), numbers(ranks, dtype=torch.float32))),
        (FROM_OTHERS, (numbers(ranks, 1000, dtype=torch.bfloat16), numbers(3 * ranks, 5, dtype=torch.float32))),
        (GATHERED, (numbers(1000, dtype=torch.bfloat16), numbers(3, 3, dtype=torch.float32))),
        (EXCHANGED, (numbers(ranks, 1000, dtype=torch.bfloat16),)),
        (GATHERED, (numbers(6, 5, dtype=torch.bfloat16),), 2),
        (FROM_OTHERS, (numbers(6 * ranks, 7, dtype=torch.bfloat16), numbers(3 * ranks, dtype=torch.float32)), 3),
        (PULLED, (numbers(4, 3, dtype=torch.float32),), 4),
        (TAKEN_OUT, (numbers(4 * ranks, 3, dtype=torch.float32),), 2),
    ]
    return [Case(*each) for each in found]


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """Delay commands at random."""
    plain = command_queues.ThreadQueue._do
    dice = random.Random(seed)

    def late(self: command_queues.ThreadQueue, command: commands.Command) -> None:
        if dice.random() < 0.1:
            time.sleep(dice.random() * 2e-3)
        plain(self, command)

    with mock.patch.object(command_queues.ThreadQueue, "_do", late):
        yield


def same_bytes_as_gloo() -> tuple[int, int, list[str]]:
    """Compare with gloo; return (number of differences, number of comparisons, names left in shared memory)."""
    wrong = count = 0
    dist.barrier()
    before = set(Path("/dev/shm").glob("overlapc-copies-*"))  # left by other jobs that were killed
    dist.barrier()
    copies = made(None, cases_of(0), 2)
    for step in range(30):
        with delays(100 * step + dist.get_rank()):
            cases = cases_of(step)
            if step == 15:  # another graph needs more of the same pool
                larger = [*cases, Case(EXCHANGED, (torch.ones(dist.get_world_size() * 1000, 11),))]
                held = made(None, larger, 1)
                assert held.pool is copies.pool
                ran(held, larger, 1)
            found = ran(copies, cases, 2)
        for case, results in zip(cases, found, strict=True):
            for result, expected in zip(results, by_gloo(case), strict=True):
                count += 1
                wrong += not torch.equal(result.view(torch.uint8), expected.view(torch.uint8))
    dist.barrier()
    return wrong, count, [path.name for path in set(Path("/dev/shm").glob("overlapc-copies-*")) - before]


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_equal_gloos_with_random_delays_and_a_pool_that_grows(ranks):
    for wrong, count, left in values_on_ranks(same_bytes_as_gloo, ranks):
        assert (wrong, count, left) == (0, 570, [])


def kept_by_a_slow_reader(rule: str) -> bool:
    """Return whether a slow reader reads the right values in a slot that the next exchange takes."""
    cases = [Case(EXCHANGED, (torch.full((2, 50_000), float(step)),)) for step in range(4)]
    copies = made(None, cases, 0)
    plain = commands._begin

    def careless(at: commands.MappedMemories, turn: commands.Turn) -> Iterator[commands.Command]:
        return (each for each in plain(at, turn) if rule != "careless" or not isinstance(each, commands.Until))

    seen = []
    with mock.patch.object(commands, "_begin", careless):
        for index, case in enumerate(cases):
            (result,) = copies.start(index, case.tensors)
            copies.wait(index)
            if dist.get_rank() == 0:
                time.sleep(0.3)
            seen.append(bool((result == index).all()))
            copies.release(index)
    dist.barrier()
    return all(seen)


def test_a_slot_that_is_still_read_is_not_overwritten():
    assert values_on_ranks(kept_by_a_slow_reader, 2, "careful") == [True, True]


def test_without_waiting_for_readers_a_slot_is_overwritten():
    """Without waiting for `done` the same program fails, so the test above can fail."""
    assert values_on_ranks(kept_by_a_slow_reader, 2, "careless")[0] is False


def fetched_by_a_slow_peer(rule: str) -> bool:
    """Return whether a slow rank fetches the right values, although a kernel of its peer writes a shard into the same
    slot next."""
    rows, rank = 50_000, dist.get_rank()
    size = 4 * rows
    events: list[Event] = [Take(0, size), Start((0,)), Release(0), Take(1, 2 * size), Start((1,)), Release(1)]
    layout = place(events)
    copies = GraphCopies(pool_of(layout.bytes), layout, [PULLED, GATHERED])
    pulled, plain = commands.pulled_gather, command_queues.ThreadQueue._do

    def gathered(*given: Any) -> Iterator[commands.Command]:
        for each in pulled(*given):
            if rule == "careful" or not (isinstance(each, commands.Until) and each.what.startswith("fetched")):
                yield each

    def slow(self: command_queues.ThreadQueue, command: commands.Command) -> None:
        if rank == 1 and isinstance(command, commands.Copy):
            time.sleep(0.2)
        plain(self, command)

    with (
        mock.patch.object(commands, "pulled_gather", gathered),
        mock.patch.object(command_queues.ThreadQueue, "_do", slow),
    ):
        (result,) = copies.start(0, [torch.full((rows,), rank + 1.0)])
        copies.wait(0)
        shard = copies.shard(1, 0, (rows,), (1,), torch.float32).fill_(7.0)
        dist.barrier()
        copies.start(1, [shard])
        copies.wait(1)
        copies.release(1)
    return bool((result[:rows] == 1).all() and (result[rows:] == 2).all())


def test_a_shard_overwrites_a_slot_only_after_peers_have_fetched_it():
    assert values_on_ranks(fetched_by_a_slow_peer, 2, "careful") == [True, True]


def test_without_waiting_for_fetches_peers_get_later_values():
    """Without waiting for `fetched` the same program fails, so the test above can fail."""
    assert values_on_ranks(fetched_by_a_slow_peer, 2, "careless") == [True, False]


def failing(rank: int, folder: str, how: str) -> None:
    """Let rank 1 fail with copies in flight; rank 0 writes its error messages and the time until they were raised."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    case = [Case(EXCHANGED, (torch.ones(2, 1000),))] * 3
    copies = made(None, case, 0, timeout_s=1.0)
    ran(copies, case, 0)
    if rank == 1:
        copies.start(0, case[0][1])
        Path(folder, "failed").touch()
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    while not Path(folder, "failed").exists():
        time.sleep(0.01)
    began = time.monotonic()
    told = []
    for _ in range(2):  # the second time, because no step may read results that never arrived
        try:
            ran(copies, case, 0)
        except PeerLost as error:
            told.append(str(error))
            copies.failed()
    Path(folder, "told").write_text("\n---\n".join([*told, f"{time.monotonic() - began}"]))
    os._exit(0)  # because the process group cannot be destroyed with one of two ranks


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_peer_that_fails_in_flight_is_named_after_the_timeout(how, tmp_path):
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=failing, args=(rank, str(tmp_path), how)) for rank in range(2)]
    try:
        for each in ranks:
            each.start()
        ranks[0].join(60)
        assert ranks[0].exitcode == 0
    finally:
        for each in ranks:
            each.kill()
            each.join()
    first, again, seconds = (tmp_path / "told").read_text().split("\n---\n")
    assert first.startswith("@dp: rank 1 has not ")
    assert "within 1 s" in first
    assert again.startswith("@dp: a step failed on this rank between its copies")
    assert float(seconds) < 10


def kept_after_a_failure() -> bool:
    """Return whether tensors of a copy in flight outlive a failed run, because peers may write and read them yet."""
    copies = made(None, [Case(PULLED, (torch.ones(1000),))], 0)
    given = torch.ones(1000)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.barrier()
    (result,) = copies.start(0, [given])
    if dist.get_rank() == 1:
        copies.wait(0)
        return True
    kept = weakref.ref(given), weakref.ref(result)
    copies.failed()
    del given, result
    dist.barrier()
    copies.pool.queue.drain()
    return all(each() is not None for each in kept)


def test_a_failed_run_keeps_the_memory_of_copies_in_flight():
    assert values_on_ranks(kept_after_a_failure, 2) == [True, True]


def after_a_failure_between_collectives() -> str:
    case = [Case(EXCHANGED, (torch.ones(2, 1000),))] * 2
    copies = made(None, case, 0)
    (_,) = copies.start(0, case[0].tensors)
    copies.wait(0)
    copies.release(0)
    copies.failed()
    with pytest.raises(PeerLost) as caught:
        copies.start(0, case[0].tensors)
    return str(caught.value)


def test_a_run_that_failed_between_its_collectives_is_followed_by_none():
    for told in values_on_ranks(after_a_failure_between_collectives, 2):
        assert told.startswith("@dp: a step failed on this rank between its copies")


def test_ranks_that_hold_different_pools_open_a_new_one_together():
    assert values_on_ranks(kept_by_one, 3) == [True, True, True]


def kept_for(pool: Pool, more_bytes: int) -> bool:
    wanted = Wanted(pool.group, "dp", pool.ranks, pool.bytes + more_bytes, "")
    return reusable_pools([wanted], CPU) == {"dp": pool}


def kept_by_one() -> bool:
    """Return whether results are right if only rank 0 still holds the pool of an earlier graph."""
    cases = cases_of(0)
    copies = made(None, cases, 2)
    ran(copies, cases, 2)
    if dist.get_rank():
        del copies
        gc.collect()
    again = made(None, cases, 2)
    copies = made(again.pool, cases, 2)
    again.start(0, cases[0][1])
    with pytest.raises(OverlapcError, match="@dp: two compiled graphs run at once"):
        copies.start(0, cases[0][1])
    again.wait(0)
    again.release(0)
    for index in range(1, len(cases)):
        again.start(index, cases[index][1])
        again.wait(index)
        if cases[index].form.in_pool:
            again.release(index)
    assert (kept_for(again.pool, 0), kept_for(again.pool, 1)) == (True, False), (
        "a pool that is too small is not reusable"
    )
    pairs = zip(cases, ran(again, cases, 2), strict=True)
    return all(torch.equal(a, b) for case, results in pairs for a, b in zip(by_gloo(case), results, strict=True))


def test_a_pool_is_freed_with_the_last_graph_that_holds_it():
    """The thread, the memory mapping and the pool itself."""
    assert values_on_ranks(let_go, 2) == [[], []]


def let_go() -> list[str]:
    """Delete a pool's last graph; return the pool's threads and memory mappings that this process still has."""
    case = [Case(GATHERED, (torch.ones(10),))]
    copies = made(None, case, 0)
    ran(copies, case, 0)
    del copies
    gc.collect()
    ends = time.monotonic() + 5
    while any(thread.name.startswith("copies of") for thread in threading.enumerate()) and time.monotonic() < ends:
        time.sleep(0.01)
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("copies of")]
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "overlapc-copies" in line]
    return [*left, *mapped]
