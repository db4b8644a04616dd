"""Schedules as text: `parse(str(schedule)) == schedule`.

    schedule llama_fwd  budget=12GiB
    %p0 = input                      : 64MiB
    ag0 = all_gather(%p0) @dp(8)     : 512MiB  1180us [table h200-nvlink]
    %w0 = wait(ag0)
    mm0 = extern:mm(%x, %w0)         : 96MiB  640us [roofline]      # mm_3 | layers.0 | model.py:31: x @ w
    return mm0

A line has one statement, or several separated by `;`. A statement is

    WRITES = OP(READS) @GROUP(SIZE) via TRANSPORT KEY=VALUE ... : SIZES  TIME [SOURCE]
    NAME = input freeable : SIZE

- WRITES: the buffers that the node defines; the first is also the node's name, unless `node=NAME` gives another.
- OP: a collective's name (a start), `wait`, `kernel`, `extern`, `view`, `noop`, `comm`, or KIND:OP.
- TRANSPORT: the transport of a collective, `copy`; without `via` it is the library of the process group (NCCL, gloo).
- KEY: `after`, `mutates` (lists), `scratch`, `flops`, `read`, `write`, `in` (dtype of the computation), `form` (of a
  generated kernel), and for communication `dtype`, `ranks`, `unit`, `channels`, `variant`, `safe=yes`, `collective`,
  `moves` (its bytes, if they differ from the collective's definition).
- SIZES: one for each write; `=NAME` for an alias, `none` for a node that defines no buffer. A wait or view without
  sizes defines aliases of what it reads. Undeclared reads are inputs of size 0.
- A time without SOURCE is `given`. Text after `#` is a comment. A node's origin is printed as a comment (FX nodes |
  module | line of the user's program) and parsed from it; equal schedules may have different origins.

Names with characters other than letters, digits and `%_.$/+-`, and sources with `]` or line breaks, are quoted as in
JSON.
"""

from __future__ import annotations

from overlapc.schedule.parser import parse
from overlapc.schedule.printer import print_node, print_schedule

__all__ = ["parse", "print_node", "print_schedule"]
