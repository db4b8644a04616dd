"""What one rank does for a collective by copies: a list of copies, flags posted to peers, waits for flags of theirs.

Every rank has one allocation of the same size, mapped into the others, and numbers the collectives of the group as it
starts them: 1, 2, ... the same on all ranks. At its head lie two flags for every peer, which that peer alone writes:

- `sent`: what this peer sends for collectives up to this number is there (in this rank's memory, or in the peer's own);
- `done`: the peer is done with memory, its own and others', that it was to let go of up to this release.

Both only grow, and collectives run in order on one queue, so a wait for `flag >= number` needs no reset and no lock.
What a collective brings lies in its slot, the same on all ranks, and is read there: each part is *pushed* from where it
lies to the slot of whoever needs it, which for a gather is everybody and for an exchange (all-to-all) its owner. Where
a result outlives the graph, a gather is *pulled* instead (the shard goes to this rank's slot, and peers copy it from
there to memory of theirs), and what an exchange pushed is *taken out* of the slot when it is there. Peers are served in
turn from rank + 1: no two ranks copy to (or from) the same one at a time. What a rank sends itself may be on its way
beside that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

FLAG_BYTES = 64  # a line of a CPU's cache each
MOST_RANKS = 64
HEAD_BYTES = 2 * MOST_RANKS * FLAG_BYTES
ALIGNMENT_BYTES = 512  # of tensors in a slot: what torch's CUDA allocator gives


class Copy(NamedTuple):
    """Bytes from one address to another."""

    target: int
    source: int
    bytes: int
    own: bool = False  # within this rank's memory: nothing but the end of the collective waits for it


class Post(NamedTuple):
    """A flag set to a value when everything before it is done and can be seen by the peer."""

    flag: int  # address
    value: int


class Until(NamedTuple):
    """Nothing after it begins before the flag has at least this value."""

    flag: int  # address, in this rank's memory
    value: int
    peer: int  # who writes it
    what: str  # for the error that says what the peer did not do


Command: TypeAlias = Copy | Post | Until


class Piece(NamedTuple):
    """A tensor of this rank: its address and bytes."""

    address: int
    bytes: int


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


@dataclass(frozen=True, slots=True)
class Turn:
    """One collective's place in the order of its group; see `layout`. Collectives and releases count from the first."""

    number: int
    offset: int  # of its slot, the same on all ranks
    settled: int  # the last release that this rank has done
    needed: int  # the release that all ranks must have done before the slot may be overwritten


def aligned(size_bytes: int) -> int:
    """The bytes that a tensor takes in a slot."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def offsets_in(offset: int, sizes: Sequence[int]) -> list[int]:
    """Where tensors of these bytes lie in a slot, one after the other."""
    found = []
    for size in sizes:
        found.append(offset)
        offset += aligned(size)
    return found


def gather(at: Places, turn: Turn, shards: Sequence[Piece]) -> Iterator[Command]:
    """The shards of all ranks lie in this rank's slot, in order of rank."""
    size = len(at.bases)
    slots = offsets_in(turn.offset, [shard.bytes * size for shard in shards])
    return _pushed(at, turn, [(shard.address, 0, shard.bytes, slot) for shard, slot in zip(shards, slots, strict=True)])


def exchange(at: Places, turn: Turn, tensors: Sequence[Piece]) -> Iterator[Command]:
    """Part r of each tensor goes to rank r; the parts for this rank lie in its slot in order of rank."""
    parts = [tensor.bytes // len(at.bases) for tensor in tensors]
    slots = offsets_in(turn.offset, [tensor.bytes for tensor in tensors])
    given = zip(tensors, parts, slots, strict=True)
    return _pushed(at, turn, [(tensor.address, part, part, slot) for tensor, part, slot in given])


def _pushed(at: Places, turn: Turn, sources: Sequence[tuple[int, int, int, int]]) -> Iterator[Command]:
    """sources: (address, bytes from one rank's part to the next one's, bytes of a part, offset of the slot)."""
    yield from _begin(at, turn)
    for peer in (at.rank, *at.peers):
        for address, step, part, slot in sources:
            yield Copy(at.bases[peer] + slot + at.rank * part, address + peer * step, part, peer == at.rank)
        if peer != at.rank:
            yield Post(at.sent(peer, at.rank), turn.number)
    for peer in at.peers:
        yield Until(at.sent(at.rank, peer), turn.number, peer, "sent its part")


def exchange_taken_out(at: Places, turn: Turn, tensors: Sequence[Piece], results: Sequence[int]) -> Iterator[Command]:
    """As `exchange`, and the parts for this rank end at `results`, outside of the slot."""
    yield from _begin(at, turn)
    parts = [tensor.bytes // len(at.bases) for tensor in tensors]
    given = list(zip(tensors, parts, offsets_in(turn.offset, [each.bytes for each in tensors]), results, strict=True))
    for tensor, part, _, result in given:
        yield Copy(result + at.rank * part, tensor.address + at.rank * part, part, own=True)
    for peer in at.peers:
        for tensor, part, slot, _ in given:
            yield Copy(at.bases[peer] + slot + at.rank * part, tensor.address + peer * part, part)
        yield Post(at.sent(peer, at.rank), turn.number)
    for peer in at.peers:
        yield Until(at.sent(at.rank, peer), turn.number, peer, "sent its part")
        for _, part, slot, result in given:
            yield Copy(result + peer * part, at.bases[at.rank] + slot + peer * part, part)


def pulled_gather(at: Places, turn: Turn, shards: Sequence[Piece], results: Sequence[int]) -> Iterator[Command]:
    """`results` are the addresses, outside of the slot, that the shards of all ranks go to, in order of rank."""
    yield from _begin(at, turn)
    slots = offsets_in(turn.offset, [shard.bytes for shard in shards])
    for shard, result in zip(shards, results, strict=True):
        yield Copy(result + at.rank * shard.bytes, shard.address, shard.bytes, own=True)
    for shard, slot in zip(shards, slots, strict=True):
        yield Copy(at.bases[at.rank] + slot, shard.address, shard.bytes)
    for peer in at.peers:
        yield Post(at.sent(peer, at.rank), turn.number)
    for peer in at.peers:
        yield Until(at.sent(at.rank, peer), turn.number, peer, "sent its shard")
        for shard, slot, result in zip(shards, slots, results, strict=True):
            yield Copy(result + peer * shard.bytes, at.bases[peer] + slot, shard.bytes)


def _begin(at: Places, turn: Turn) -> Iterator[Command]:
    for peer in at.peers:
        yield Post(at.done(peer, at.rank), turn.settled)
    for peer in at.peers:
        yield Until(at.done(at.rank, peer), turn.needed, peer, "let go of memory that is to be used again")
