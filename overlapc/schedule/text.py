"""Schedules as text: `parse(str(schedule)) == schedule`.

    schedule llama_fwd  budget=12GiB
    %p0 = input                      : 64MiB
    ag0 = all_gather(%p0) @dp(8)     : 512MiB  1180us [table h200-nvlink]
    %w0 = wait(ag0)
    mm0 = extern:mm(%x, %w0)         : 96MiB  640us [roofline]      # mm_3 | layers.0 | model.py:31: x @ w
    return mm0

One statement a line, or several with `;`. A statement is

    WRITES = OP(READS) @GROUP(SIZE) via TRANSPORT KEY=VALUE ... : SIZES  TIME [SOURCE]
    NAME = input freeable : SIZE

- WRITES: the buffers it defines; the first is also the node's name unless `node=NAME` says otherwise.
- OP: a collective's name (a start), `wait`, `kernel`, `extern`, `view`, `noop`, `comm`, or KIND:OP.
- TRANSPORT: what carries a collective, `copy`; without `via` it is the library of the process group (NCCL, gloo).
- KEY: `after`, `mutates` (lists), `scratch`, `flops`, `read`, `write`, `in` (what the work is done in), `form` (of a
  generated kernel), and for communication `dtype`, `ranks`, `unit`, `channels`, `safe=yes`, `collective`, `moves` (its
  bytes, when not its definition's).
- SIZES: one a write; `=NAME` for an alias, `none` for a node that defines nothing. A wait or view that
  says nothing defines aliases of what it reads. Undeclared reads are inputs of no size.
- A time without SOURCE is `given`. Text after `#` is a comment. Origins print as one (FX nodes | module | line of the
  user's program), and a comment of that form is read as one; of schedules that are equal they may differ.

Names with other characters than letters, digits and `%_.$/+-` are quoted as in JSON.
"""

from __future__ import annotations

from overlapc.schedule.parser import parse
from overlapc.schedule.printer import print_node, print_schedule

__all__ = ["parse", "print_node", "print_schedule"]
