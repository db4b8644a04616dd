"""The kinds of collectives, one row for each: how bytes are counted, how launches are merged, and possible transports.

All code that depends on the kind of a collective reads this table, so that adding a kind or transport means one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LIBRARY = ""  # `Comm.via` of a collective over the process group's library (NCCL, gloo)
COPY = "copy"  # copies between the memories of ranks of one host (copy engines on GPUs), which take no multiprocessors


@dataclass(frozen=True, slots=True)
class CollectiveKind:
    """One row of the table. `op`: the functional op in torch.ops._c10d_functional."""

    name: str  # as in `Comm.collective` and in the text of schedules
    op: str
    output_sized: bool  # its bytes are those of its output; else those of its input
    equal_sizes: bool  # sizes are equal on all ranks
    brings_inputs: bool = False  # later compute reads its result, so it should run early; else it sends results away
    coalesced: bool = False  # the library can launch it on several tensors at once
    mixed_dtypes: bool = False  # these tensors may have several dtypes
    by_copies: bool = False  # it moves bytes and computes nothing, so copies can carry it out


_ROWS = (
    CollectiveKind(
        "all_gather", "all_gather_into_tensor", output_sized=True, equal_sizes=True, brings_inputs=True,
        coalesced=True, mixed_dtypes=True, by_copies=True,
    ),
    CollectiveKind(
        "reduce_scatter", "reduce_scatter_tensor", output_sized=False, equal_sizes=True,
        coalesced=True, mixed_dtypes=True,
    ),
    CollectiveKind("all_reduce", "all_reduce", output_sized=False, equal_sizes=True, coalesced=True),
    CollectiveKind("all_to_all", "all_to_all_single", output_sized=True, equal_sizes=False, by_copies=True),
    CollectiveKind("broadcast", "broadcast", output_sized=False, equal_sizes=True),
)  # fmt: skip
KINDS: Mapping[str, CollectiveKind] = {row.name: row for row in _ROWS}
NAMES = tuple(KINDS)
TRANSPORTS = (COPY,)  # transports that a schedule's text can name


def several_in_one(collective: str, via: str) -> bool:
    """Whether one launch on several tensors can replace several launches."""
    kind = KINDS.get(collective)
    return kind is not None and (kind.by_copies if via == COPY else kind.coalesced)


def one_dtype(collective: str, via: str) -> bool:
    """Whether such a launch requires tensors of one dtype. Copies move bytes of any dtype."""
    kind = KINDS.get(collective)
    return via != COPY and (kind is None or not kind.mixed_dtypes)


def equal_sizes(collective: str, via: str) -> bool:
    """Whether ranks communicate data of equal size: not in an all-to-all over the library, nor in unknown kinds."""
    kind = KINDS.get(collective)
    return via == COPY or (kind is not None and kind.equal_sizes)
