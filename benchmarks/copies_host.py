"""What it costs the host to start a collective by copies: Python's part, without the calls of the device's driver.

    python benchmarks/copies_host.py

A unit of nine tensors, as a Llama layer has, for eight ranks in one process; nothing is copied. `made anew` is what a
start costs whose gradients lie elsewhere than in the step before, so that its commands have to be made again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from tabulate import tabulate

from overlapc.runtime.copies.commands import HEAD_BYTES, Command, Places, Run
from overlapc.runtime.copies.layout import Event, Release, Start, Take, place
from overlapc.runtime.copies.pool import Form, GraphCopies
from overlapc.runtime.copies.shared_memory import Memory

RANKS, TENSORS, ROWS, RUNS = 8, 9, 1024, 500


class Nowhere:
    """A queue that forgets what it is given."""

    def run(self, commands: Sequence[Command], run: Run) -> None:
        """Does nothing."""

    def wait(self, done: None) -> None:
        """Does nothing."""


def start_us(form: Form, *, anew: bool) -> float:
    """Host time of one start, its wait and its release."""
    size_bytes = 4 * ROWS * (RANKS if form is Form.GATHERED else 1)
    tensors = tuple(range(TENSORS))
    events: list[Event] = [*(Take(at, size_bytes) for at in tensors), Start(tensors), *map(Release, tensors)]
    layout = place(events)
    own = torch.zeros(max(layout.bytes, HEAD_BYTES), dtype=torch.uint8)
    memory = Memory(own, Places(0, (own.data_ptr(), *(1 << 40 + at for at in range(1, RANKS)))))
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
    """The table."""
    rows = [
        (form.value, start_us(form, anew=False), start_us(form, anew=True))
        for form in (Form.GATHERED, Form.FROM_OTHERS, Form.EXCHANGED)
    ]
    print(tabulate(rows, headers=["form", "µs a start", "µs, made anew"], floatfmt=".1f"))


if __name__ == "__main__":
    main()
