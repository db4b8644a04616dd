"""What one rank does for a collective by copies: a list of copies, flags posted to peers, waits for flags of theirs.

Every rank has one allocation of the same size, mapped into the others, and numbers the collectives of the group as it
starts them: 1, 2, ... the same on all ranks. At its head lie three flags for every peer, which that peer alone writes:

- `sent`: what this peer sends for collectives up to this number is there (in this rank's memory, or in the peer's own);
- `fetched`: the peer has copied from this rank's memory what it was to copy for collectives up to this number;
- `done`: the peer is done with memory, its own and others', that it was to let go of up to this release.

All only grow, and collectives run in order on one queue, so a wait for `flag >= number` needs no reset and no lock.
Each tensor that a collective brings lies in a slot, the same on all ranks, and is read there: each part is *pushed*
from where it lies to the slot of whoever needs it, which for a gather is everybody and for an exchange (all-to-all) its
owner. A tensor of several blocks is gathered, or exchanged, block by block: its parts are as many pieces, which is how
the ranks of one host serve a group of several hosts. What a rank has for itself is best not copied at all: the kernel
that makes a shard writes it to its place in the slot, and whoever adds up parts reads this rank's own where it lies.
Where a result outlives the graph, a gather is *pulled* instead (the shard goes to this rank's slot, and peers copy it
from there to memory of theirs), and what an exchange pushed is *taken out* of the slot when it is there. Peers are
served in turn from rank + 1: no two ranks copy to (or from) the same one at a time. What a rank copies to itself may be
on its way beside that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

FLAG_BYTES = 64  # a line of a CPU's cache each
MOST_RANKS = 64
HEAD_BYTES = 3 * MOST_RANKS * FLAG_BYTES
ALIGNMENT_BYTES = 512  # of slots: what torch's CUDA allocator gives


class Copy(NamedTuple):
    """Bytes from one address to another."""

    target: int
    source: int
    bytes: int
    own: bool = False  # within this rank's memory: nothing but the end of the collective waits for it


class Post(NamedTuple):
    """A flag set to a value when everything before it is done and can be seen by the peer."""

    flag: int  # address
    value: int  # counted as in `in_run`
    release: bool = False


class Until(NamedTuple):
    """Nothing after it begins before the flag has at least this value."""

    flag: int  # address, in this rank's memory
    value: int  # counted as in `in_run`
    peer: int  # who writes it
    what: str  # for the error that says what the peer did not do
    release: bool = False


Command: TypeAlias = Copy | Post | Until


class Run(NamedTuple):
    """The numbers of the first collective and the first release of a run of a graph."""

    collective: int
    release: int


def in_run(flag: Post | Until, run: Run) -> Post | Until:
    """The command with its value in this run. Values count from the run's first collective, or first release: so
    commands are the same in every run of a graph."""
    value = flag.value + (run.release if flag.release else run.collective)
    if isinstance(flag, Post):
        return Post(flag.flag, value, flag.release)
    return Until(flag.flag, value, flag.peer, flag.what, flag.release)


class Given(NamedTuple):
    """A tensor of this rank: its address and bytes, and of how many blocks it is, each gathered or exchanged alone."""

    address: int
    bytes: int
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class Places:
    """Where the ranks' memories are mapped in this process, by rank within the group."""

    rank: int
    bases: tuple[int, ...]

    @property
    def peers(self) -> list[int]:
        """The other ranks in turn, from the next one on."""
        size = len(self.bases)
        return [(self.rank + step) % size for step in range(1, size)]

    def sent(self, holder: int, writer: int) -> int:
        """The address of a `sent` flag, in the memory of `holder`."""
        return self.bases[holder] + writer * FLAG_BYTES

    def done(self, holder: int, writer: int) -> int:
        """The address of a `done` flag."""
        return self.bases[holder] + (MOST_RANKS + writer) * FLAG_BYTES

    def fetched(self, holder: int, writer: int) -> int:
        """The address of a `fetched` flag."""
        return self.bases[holder] + (2 * MOST_RANKS + writer) * FLAG_BYTES


@dataclass(frozen=True, slots=True)
class Turn:
    """One collective's place in a run of its graph; see `layout`. Numbers count from the run's first."""

    number: int
    slots: tuple[int, ...]  # offsets of its tensors, the same on all ranks
    settled: int  # the last release that this rank has done
    needed: int  # the release that all ranks must have done before the slots may be overwritten


def aligned(size_bytes: int) -> int:
    """The bytes that a tensor takes in the memory."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class _Pieces(NamedTuple):
    """A part of a tensor: one piece a block, `step` bytes apart."""

    address: int
    step: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of a collective: what this rank sends of it, and how what is brought lies."""

    given: Given
    slot: int  # offset
    ranks: int
    shares: bool  # each rank gets a part of its own; else all get the same

    @property
    def piece_bytes(self) -> int:
        return self.given.bytes // self.given.blocks // (self.ranks if self.shares else 1)

    def for_rank(self, rank: int) -> _Pieces:
        """What this rank has for another."""
        size, address = self.piece_bytes, self.given.address
        return _Pieces(address + rank * size, self.ranks * size) if self.shares else _Pieces(address, size)

    def brought(self, address: int, place: int) -> _Pieces:
        """The `place`-th part of what is brought to an address: a piece in each block of a shard, all of a share."""
        size = self.piece_bytes
        if self.shares:
            return _Pieces(address + place * size * self.given.blocks, size)
        return _Pieces(address + place * size, self.ranks * size)

    def copies(self, target: _Pieces, source: _Pieces, own: bool = False) -> Iterator[Copy]:
        """Of all pieces of a part."""
        for block in range(self.given.blocks):
            to, of = target.address + block * target.step, source.address + block * source.step
            yield Copy(to, of, self.piece_bytes, own)


def _tensors(at: Places, turn: Turn, given: Sequence[Given], *, shares: bool) -> list[_Tensor]:
    return [_Tensor(each, slot, len(at.bases), shares) for each, slot in zip(given, turn.slots, strict=True)]


def gather(at: Places, turn: Turn, shards: Sequence[Given]) -> Iterator[Command]:
    """The shards of all ranks lie in this rank's slots, in order of rank. A shard of its own may lie there already."""
    tensors = _tensors(at, turn, shards, shares=False)
    yield from _begin(at, turn)
    for tensor in tensors:
        own = tensor.brought(at.bases[at.rank] + tensor.slot, at.rank)
        if tensor.given.address != own.address:
            yield from tensor.copies(own, tensor.for_rank(at.rank), own=True)
    yield from _pushed(at, turn, tensors, lambda peer: at.rank)


def exchange(at: Places, turn: Turn, given: Sequence[Given]) -> Iterator[Command]:
    """Part r of each tensor goes to rank r; the parts for this rank lie in its slots in order of rank."""
    tensors = _tensors(at, turn, given, shares=True)
    yield from _begin(at, turn)
    for tensor in tensors:
        own = tensor.brought(at.bases[at.rank] + tensor.slot, at.rank)
        yield from tensor.copies(own, tensor.for_rank(at.rank), own=True)
    yield from _pushed(at, turn, tensors, lambda peer: at.rank)


def exchange_with_others(at: Places, turn: Turn, given: Sequence[Given]) -> Iterator[Command]:
    """Part r of each tensor goes to rank r, without a copy of this rank's own; its slots hold the peers' parts."""
    yield from _begin(at, turn)
    yield from _pushed(at, turn, _tensors(at, turn, given, shares=True), lambda peer: at.rank - (at.rank > peer))


def _pushed(at: Places, turn: Turn, tensors: Sequence[_Tensor], place: Callable[[int], int]) -> Iterator[Command]:
    """place: how many parts lie in front of this rank's in the slot of a peer."""
    yield from _sent(at, turn, tensors, place)
    for peer in at.peers:
        yield Until(at.sent(at.rank, peer), turn.number, peer, "sent its part")


def _sent(at: Places, turn: Turn, tensors: Sequence[_Tensor], place: Callable[[int], int]) -> Iterator[Command]:
    for peer in at.peers:
        for tensor in tensors:
            there = tensor.brought(at.bases[peer] + tensor.slot, place(peer))
            yield from tensor.copies(there, tensor.for_rank(peer))
        yield Post(at.sent(peer, at.rank), turn.number)


def exchange_taken_out(at: Places, turn: Turn, given: Sequence[Given], results: Sequence[int]) -> Iterator[Command]:
    """As `exchange`, and the parts for this rank end at `results`, outside of the slots."""
    tensors = _tensors(at, turn, given, shares=True)
    yield from _begin(at, turn)
    for tensor, result in zip(tensors, results, strict=True):
        yield from tensor.copies(tensor.brought(result, at.rank), tensor.for_rank(at.rank), own=True)
    yield from _sent(at, turn, tensors, lambda peer: at.rank)
    for peer in at.peers:
        yield Until(at.sent(at.rank, peer), turn.number, peer, "sent its part")
        for tensor, result in zip(tensors, results, strict=True):
            arrived = tensor.brought(at.bases[at.rank] + tensor.slot, peer)
            yield from tensor.copies(tensor.brought(result, peer), arrived)


def pulled_gather(at: Places, turn: Turn, shards: Sequence[Given], results: Sequence[int]) -> Iterator[Command]:
    """`results` are the addresses, outside of the slots, that the shards of all ranks go to, in order of rank.

    It is done when the peers have fetched this rank's shard, too: then its slot may be written by whoever comes next.
    """
    tensors = _tensors(at, turn, shards, shares=False)
    yield from _begin(at, turn)
    for tensor, result in zip(tensors, results, strict=True):
        yield from tensor.copies(tensor.brought(result, at.rank), tensor.for_rank(at.rank), own=True)
    for tensor in tensors:
        yield Copy(at.bases[at.rank] + tensor.slot, tensor.given.address, tensor.given.bytes)
    for peer in at.peers:
        yield Post(at.sent(peer, at.rank), turn.number)
    for peer in at.peers:
        yield Until(at.sent(at.rank, peer), turn.number, peer, "sent its shard")
        for tensor, result in zip(tensors, results, strict=True):
            shard = _Pieces(at.bases[peer] + tensor.slot, tensor.piece_bytes)
            yield from tensor.copies(tensor.brought(result, peer), shard)
        yield Post(at.fetched(peer, at.rank), turn.number)
    for peer in at.peers:
        yield Until(at.fetched(at.rank, peer), turn.number, peer, "fetched this rank's shard")


def _begin(at: Places, turn: Turn) -> Iterator[Command]:
    for peer in at.peers:
        yield Post(at.done(peer, at.rank), turn.settled, release=True)
    for peer in at.peers:
        yield Until(
            at.done(at.rank, peer), turn.needed, peer, "let go of memory that is to be used again", release=True
        )
