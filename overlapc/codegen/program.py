"""A compiled graph as a flat list of instructions; wrappers are printers of it, `build` makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from overlapc.codegen.kernel import KernelSource
from overlapc.ir.ops import (
    Combo,
    Extern,
    Layout,
    Loops,
    Wait,
)


@dataclass(frozen=True, slots=True)
class BindSize:
    """`symbol` is the size (or stride) of an argument or result: `s0 = primals_2.size(0)`."""

    symbol: sympy.Symbol
    variable: str
    dim: int | None = None  # None: the variable itself is the number
    stride: bool = False


@dataclass(frozen=True, slots=True)
class CheckInput:
    """The argument has the traced layout; a wrong one is an error, never a wrong number."""

    variable: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class Allocate:
    """Fresh memory for a buffer."""

    variable: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory that several buffers are carved from."""

    variable: str
    device: torch.device
    bytes: int


@dataclass(frozen=True, slots=True)
class Carve:
    """A buffer in a pool, `offset` bytes from its start."""

    variable: str
    pool: str
    offset: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A dying buffer's memory under a new name and layout of equal bytes."""

    variable: str
    source: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class Reuse:
    """An argument's memory under another name if nobody but this graph holds it by then, else new memory.

    The argument stays a variable until it is freed: the next launch reads it while it writes here.
    """

    variable: str
    source: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class Launch:
    """A generated kernel on its arguments."""

    kernel: KernelSource
    op: Loops | Combo
    variables: tuple[str, ...]  # one per `kernel.buffers`


@dataclass(frozen=True, slots=True)
class Call:
    """An extern call, or the start of a collective. `results` assigns parts of what it returns to variables."""

    op: Extern
    results: tuple[tuple[str, tuple[int, ...]], ...]  # variable, path into the returned structure
    starts: bool = False


@dataclass(frozen=True, slots=True)
class ExpectLayout:
    """The result of a call has the traced strides, or is copied into them: what comes after relies on it.

    Another size than the traced one is an error.
    """

    variable: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Blocks the compute stream until the collective that fills `variable` is done."""

    variable: str
    op: Wait
    by: Callable[[], None] | None = None  # what blocks it; None: the library that started it


@dataclass(frozen=True, slots=True)
class Release:
    """Nothing launched from here on reads what copies brought into a pool: its memory may take what comes next."""

    by: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Free:
    """Variables that nobody uses any more."""

    variables: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Return:
    """Views, sizes and plain values, as the graph returns them."""

    values: tuple[Any, ...]


Home = Allocate | TakeOver | Reuse
Memory = Home | Pool | Carve | Free
Instruction = BindSize | CheckInput | Memory | Launch | Call | ExpectLayout | WaitFor | Release | Return


@dataclass(frozen=True, slots=True)
class Program:
    """What a wrapper prints. `variables` gives each buffer's variable, `layouts` that variable's own layout."""

    name: str
    inputs: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    variables: Mapping[str, str]
    layouts: Mapping[str, Layout]
    constants: Mapping[str, Any]
    on_failure: tuple[Callable[[], None], ...] = ()  # told before an exception leaves the program

    def kernels(self) -> list[KernelSource]:
        """Every kernel once, in order of first launch."""
        launched = (item.kernel for item in self.instructions if isinstance(item, Launch))
        return list({kernel.name: kernel for kernel in launched}.values())

    def __str__(self) -> str:
        return "\n".join(str(item) for item in self.instructions)
