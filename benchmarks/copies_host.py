"""Measure the host time of starting a collective by copies: the Python part, without calls to the device driver.

    python benchmarks/copies_host.py

One unit of nine tensors, as in a Llama layer, for eight ranks in one process; nothing is copied. `made anew` is the
cost of a start whose gradients have other addresses than in the previous step, so that its commands must be rebuilt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from tabulate import tabulate

from overlapc.runtime.copies.commands import HEAD_BYTES, Command, MappedMemories, Run
from overlapc.runtime.copies.layout import Event, Release, Start, Take, place
from overlapc.runtime.copies.pool import Form, GraphCopies
from overlapc.runtime.copies.shared_memory import Memory

RANKS, TENSORS, ROWS, RUNS = 8, 9, 1024, 500


class Nowhere:
    """A queue that discards all commands."""

    def run(self, commands: Sequence[Command], run: Run) -> None:
        """Do nothing."""

    def wait(self, done: None) -> None:
        """Do nothing."""


def start_us(form: Form, *, anew: bool) -> float:
    """Return the host time in µs of one start with its wait and release; `anew`: the gradients move at every step."""
    size_bytes = 4 * ROWS * (RANKS if form is Form.GATHERED else 1)
    tensors = tuple(range(TENSORS))
    events: list[Event] = [*(Take(at, size_bytes) for at in tensors), Start(tensors), *map(Release, tensors)]
    layout = place(events)
    own = torch.zeros(max(layout.bytes, HEAD_BYTES), dtype=torch.uint8)
    memory = Memory(own, MappedMemories(0, (own.data_ptr(), *(1 << 40 + at for at in range(1, RANKS)))))
    pool: Any = SimpleNamespace(
        memory=memory, views=WeakKeyDictionary(), queue=Nowhere(), rank=0, ranks=tuple(range(RANKS)), name="dp",
        number=0, released=0, held=0, failed=False,
    )  # fmt: skip
    copies = GraphCopies(cast("Any", pool), layout, [form])
    given = [[torch.empty(ROWS) for _ in tensors] for _ in range(2)]
    began = 0.0
    for step in range(2 * RUNS):
        if step == RUNS:  # the first half is warm-up
            began = time.process_time()
        copies.start(0, given[step % 2 if anew else 0])
        copies.wait(0)
        copies.release(0)
    return (time.process_time() - began) / RUNS * 1e6


def main() -> None:
    """Print the table."""
    rows = [
        (form.value, start_us(form, anew=False), start_us(form, anew=True))
        for form in (Form.GATHERED, Form.FROM_OTHERS, Form.EXCHANGED)
    ]
    print(tabulate(rows, headers=["form", "µs a start", "µs, made anew"], floatfmt=".1f"))


if __name__ == "__main__":
    main()
