"""What one rank does for a collective by copies: a list of copies, flags posted to peers, and waits for their flags.

Every rank has one allocation of the same size, mapped into the other ranks' processes, and numbers the collectives of
the group as it starts them: 1, 2, ..., the same on all ranks. The allocation begins with three flags for every peer,
which only that peer writes:

- `sent`: what this peer sends for collectives up to this number has arrived (in this rank's memory) or can be fetched
  (from the peer's memory);
- `fetched`: the peer has copied from this rank's memory all that it needs for collectives up to this number;
- `done`: the peer no longer uses the memory, its own and other ranks', that is freed by releases up to this number.

Flags only grow, and collectives run in order on one queue, so a wait for `flag >= number` needs no reset and no lock.
Each tensor that a collective produces has a slot, at the same offset on all ranks, and is read there: each part is
*pushed* from its address into the slot of every rank that needs it, which for a gather are all ranks and for an
exchange (all-to-all) its owner. A tensor of several blocks is gathered, or exchanged, block by block, so each part has
one piece per block: this is how the ranks of one host serve a group of several hosts. A rank's own part is best not
copied at all: the kernel that computes a shard writes it to its place in the slot, and the kernel that adds up parts
reads this rank's part at its original address. If a result outlives the graph, a gather is *pulled* instead (the shard
lies in this rank's slot, and peers copy it from there to their own memory), and the parts that an exchange pushed are
*taken out* of the slot once they have arrived. A rank serves its peers in turn, from rank + 1 on, so that no two
ranks copy to (or from) the same rank at a time. Copies within a rank's own memory may run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, overload

FLAG_BYTES = 64  # each flag has its own CPU cache line
MOST_RANKS = 64
HEAD_BYTES = 3 * MOST_RANKS * FLAG_BYTES
ALIGNMENT_BYTES = 512  # of slots: that of torch's CUDA allocator


class Copy(NamedTuple):
    """Copy bytes from one address to another."""

    target: int
    source: int
    bytes: int
    own: bool = False  # within this rank's memory: only the end of the collective waits for it


class Post(NamedTuple):
    """Set a flag to a value once everything before it is done and visible to the peer."""

    flag: int  # address
    value: int  # counted as in `in_run`
    release: bool = False


class Until(NamedTuple):
    """Let nothing after this command begin before the flag has at least this value."""

    flag: int  # address, in this rank's memory
    value: int  # counted as in `in_run`
    peer: int  # the rank that writes the flag
    what: str  # what the peer has not done if this times out, for the error
    release: bool = False


Command: TypeAlias = Copy | Post | Until


class Run(NamedTuple):
    """The numbers of the first collective and the first release of a run of a graph."""

    collective: int
    release: int


@overload
def in_run(flag: Until, run: Run) -> Until: ...


@overload
def in_run(flag: Post | Until, run: Run) -> Post | Until: ...


def in_run(flag: Post | Until, run: Run) -> Post | Until:
    """Return the command with its value in this run.

    Values in commands count from the run's first collective, or first release, so that commands are the same in every
    run of a graph.
    """
    return flag._replace(value=flag.value + (run.release if flag.release else run.collective))


class Given(NamedTuple):
    """A tensor of this rank: its address, its bytes, and its number of blocks, each gathered or exchanged alone."""

    address: int
    bytes: int
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class MappedMemories:
    """The addresses at which the ranks' memories are mapped in this process, by rank within the group."""

    rank: int
    bases: tuple[int, ...]

    @property
    def peers(self) -> list[int]:
        """The other ranks in the order in which this rank serves them, from the next rank on."""
        size = len(self.bases)
        return [(self.rank + step) % size for step in range(1, size)]

    def sent(self, holder: int, writer: int) -> int:
        """Return the address of the `sent` flag in the memory of `holder` that `writer` writes."""
        return self.bases[holder] + writer * FLAG_BYTES

    def done(self, holder: int, writer: int) -> int:
        """Return the address of a `done` flag, as `sent` does."""
        return self.bases[holder] + (MOST_RANKS + writer) * FLAG_BYTES

    def fetched(self, holder: int, writer: int) -> int:
        """Return the address of a `fetched` flag, as `sent` does."""
        return self.bases[holder] + (2 * MOST_RANKS + writer) * FLAG_BYTES


@dataclass(frozen=True, slots=True)
class Turn:
    """One collective's place in a run of its graph; see `layout`. Numbers count from the run's first one."""

    number: int
    slots: tuple[int, ...]  # offsets of its tensors, the same on all ranks
    settled: int  # the last release that this rank has completed
    needed: int  # the release that all ranks must have completed before the slots may be overwritten


def aligned(size_bytes: int) -> int:
    """Return the bytes that a tensor of this size takes in the memory, with alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class _Pieces(NamedTuple):
    """A part of a tensor: one piece per block, `step` bytes apart."""

    address: int
    step: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of a collective: what this rank sends of it, and how the result is laid out."""

    given: Given
    slot: int  # offset
    ranks: int
    shares: bool  # each rank gets a different part; otherwise all ranks get the same part

    @property
    def piece_bytes(self) -> int:
        return self.given.bytes // self.given.blocks // (self.ranks if self.shares else 1)

    def for_rank(self, rank: int) -> _Pieces:
        """Return the part that this rank sends to `rank`."""
        size, address = self.piece_bytes, self.given.address
        return _Pieces(address + rank * size, self.ranks * size) if self.shares else _Pieces(address, size)

    def received(self, address: int, place: int) -> _Pieces:
        """Return the `place`-th part of a result at `address`: one piece in each block, or contiguous if `shares`."""
        size = self.piece_bytes
        if self.shares:
            return _Pieces(address + place * size * self.given.blocks, size)
        return _Pieces(address + place * size, self.ranks * size)

    def copies(self, target: _Pieces, source: _Pieces, own: bool = False) -> Iterator[Copy]:
        """Yield the copies of all pieces of a part."""
        for block in range(self.given.blocks):
            to, of = target.address + block * target.step, source.address + block * source.step
            yield Copy(to, of, self.piece_bytes, own)


def _tensors(at: MappedMemories, turn: Turn, given: Sequence[Given], *, shares: bool) -> list[_Tensor]:
    return [_Tensor(each, slot, len(at.bases), shares) for each, slot in zip(given, turn.slots, strict=True)]


def gather(at: MappedMemories, turn: Turn, shards: Sequence[Given]) -> Iterator[Command]:
    """Gather the shards of all ranks into this rank's slots, in order of rank; its own shard may lie there already."""
    tensors = _tensors(at, turn, shards, shares=False)
    yield from _begin(at, turn)
    for tensor in tensors:
        own = tensor.received(at.bases[at.rank] + tensor.slot, at.rank)
        if tensor.given.address != own.address:
            yield from tensor.copies(own, tensor.for_rank(at.rank), own=True)
    yield from _pushed(at, turn, tensors, lambda peer: at.rank)


def exchange(at: MappedMemories, turn: Turn, given: Sequence[Given]) -> Iterator[Command]:
    """Send part r of each tensor to rank r; the parts for this rank lie in its slots in order of rank."""
    tensors = _tensors(at, turn, given, shares=True)
    yield from _begin(at, turn)
    for tensor in tensors:
        own = tensor.received(at.bases[at.rank] + tensor.slot, at.rank)
        yield from tensor.copies(own, tensor.for_rank(at.rank), own=True)
    yield from _pushed(at, turn, tensors, lambda peer: at.rank)


def exchange_with_others(at: MappedMemories, turn: Turn, given: Sequence[Given]) -> Iterator[Command]:
    """Send part r of each tensor to rank r, without copying this rank's own part; its slots hold the peers' parts."""
    yield from _begin(at, turn)
    yield from _pushed(at, turn, _tensors(at, turn, given, shares=True), lambda peer: at.rank - (at.rank > peer))


def _pushed(
    at: MappedMemories, turn: Turn, tensors: Sequence[_Tensor], place: Callable[[int], int]
) -> Iterator[Command]:
    """Push this rank's parts and wait for the peers' parts.

    place: the number of parts before this rank's part in a peer's slot.
    """
    yield from _sent(at, turn, tensors, place)
    for peer in at.peers:
        yield Until(at.sent(at.rank, peer), turn.number, peer, "sent its part")


def _sent(at: MappedMemories, turn: Turn, tensors: Sequence[_Tensor], place: Callable[[int], int]) -> Iterator[Command]:
    for peer in at.peers:
        for tensor in tensors:
            there = tensor.received(at.bases[peer] + tensor.slot, place(peer))
            yield from tensor.copies(there, tensor.for_rank(peer))
        yield Post(at.sent(peer, at.rank), turn.number)


def exchange_taken_out(
    at: MappedMemories, turn: Turn, given: Sequence[Given], results: Sequence[int]
) -> Iterator[Command]:
    """Exchange as `exchange` does, then copy the parts for this rank to the addresses `results`, outside the slots."""
    tensors = _tensors(at, turn, given, shares=True)
    yield from _begin(at, turn)
    for tensor, result in zip(tensors, results, strict=True):
        yield from tensor.copies(tensor.received(result, at.rank), tensor.for_rank(at.rank), own=True)
    yield from _sent(at, turn, tensors, lambda peer: at.rank)
    for peer in at.peers:
        yield Until(at.sent(at.rank, peer), turn.number, peer, "sent its part")
        for tensor, result in zip(tensors, results, strict=True):
            arrived = tensor.received(at.bases[at.rank] + tensor.slot, peer)
            yield from tensor.copies(tensor.received(result, peer), arrived)


def pulled_gather(at: MappedMemories, turn: Turn, shards: Sequence[Given], results: Sequence[int]) -> Iterator[Command]:
    """Gather the shards of all ranks, in order of rank, to the addresses `results`, which lie outside of the slots;
    this rank's shards may lie in the slots already.

    It ends when the peers have fetched this rank's shard, too, so that the next user of the slot may write to it.
    """
    tensors = _tensors(at, turn, shards, shares=False)
    yield from _begin(at, turn)
    for tensor, result in zip(tensors, results, strict=True):
        yield from tensor.copies(tensor.received(result, at.rank), tensor.for_rank(at.rank), own=True)
    for tensor in tensors:
        staged = at.bases[at.rank] + tensor.slot
        if tensor.given.address != staged:
            yield Copy(staged, tensor.given.address, tensor.given.bytes)
    for peer in at.peers:
        yield Post(at.sent(peer, at.rank), turn.number)
    for peer in at.peers:
        yield Until(at.sent(at.rank, peer), turn.number, peer, "sent its shard")
        for tensor, result in zip(tensors, results, strict=True):
            shard = _Pieces(at.bases[peer] + tensor.slot, tensor.piece_bytes)
            yield from tensor.copies(tensor.received(result, peer), shard)
        yield Post(at.fetched(peer, at.rank), turn.number)
    for peer in at.peers:
        yield Until(at.fetched(at.rank, peer), turn.number, peer, "fetched this rank's shard")


def _begin(at: MappedMemories, turn: Turn) -> Iterator[Command]:
    for peer in at.peers:
        yield Post(at.done(peer, at.rank), turn.settled, release=True)
    for peer in at.peers:
        yield Until(at.done(at.rank, peer), turn.needed, peer, "released memory that is to be reused", release=True)
