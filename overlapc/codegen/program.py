"""A compiled graph as a flat list of instructions: `program_builder` builds it, wrappers print it.

Each class of instruction defines which variables it reads and defines, how it prints and on which device it runs. A new
kind of instruction is a class here and the place in `program_builder.py` that creates it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import sympy
import torch

from overlapc.codegen.generators import KernelSource
from overlapc.ir.ops import (
    Extern,
    Handle,
    Kernel,
    Layout,
    View,
    Wait,
    buffers_written,
    inputs_of,
    named_in,
    views_in,
)
from overlapc.runtime import support
from overlapc.runtime.collective_ops import WAITED_ONE_BY_ONE
from overlapc.runtime.marks import Label

if TYPE_CHECKING:
    from overlapc.codegen.capturable import Rules
    from overlapc.codegen.fx import FxWrapper
    from overlapc.codegen.python import PythonWrapper

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class Instruction(ABC):
    """One step of a program. The parameter `program` of its methods is the program that contains it."""

    __slots__ = ()

    outside_captures: ClassVar[bool] = False  # never part of a CUDA graph, and not reported as a cut

    @property
    def device(self) -> torch.device | None:
        """The device that must be current while it runs; None if that does not matter."""
        return None

    def reads(self, program: Program) -> tuple[str, ...]:
        """Return the variables that must be defined before."""
        return ()

    def makes(self) -> tuple[str, ...]:
        """Return the variables that it defines or redefines."""
        return ()

    def overwrites(self, program: Program) -> tuple[str, ...]:
        """Return the variables that were defined before and whose contents it changes."""
        return ()

    def frees(self) -> tuple[str, ...]:
        """Return the variables that it deletes."""
        return ()

    def allocates(self, program: Program) -> tuple[tuple[str, sympy.Expr], ...]:
        """Return (variable, bytes) for the memory that it allocates."""
        return ()

    def refusal(self, rules: Rules) -> str | None:
        """Return why a CUDA graph cannot capture it, or None if it can."""
        return None

    @abstractmethod
    def python(self, wrapper: PythonWrapper) -> list[str]:
        """Return its lines of Python source."""

    def tracked(self, wrapper: PythonWrapper, lines: list[str]) -> list[str]:
        """Return `lines` (those of `python`) with calls of the lifecycle tracker before and after them."""
        return lines

    def add_to(self, wrapper: FxWrapper) -> None:
        """Add its nodes to the FX graph.

        Pools, copies and reused arguments have no nodes: programs for the FX wrapper are built without them.
        """
        raise AssertionError(f"a program for the FX wrapper holds {self}")


class NodeInstruction(Instruction):
    """An instruction that runs a node of the schedule: profiler marks and checks of values apply to these."""

    __slots__ = ()

    op: Kernel | Extern | Wait

    @abstractmethod
    def mark(self, graph: str) -> Label:
        """Return the label of its mark in a profiler's trace."""

    @abstractmethod
    def written(self, program: Program) -> list[str]:
        """Return the variables that hold results right after the instruction."""


@dataclass(frozen=True, slots=True)
class BindSize(Instruction):
    """Assigns the size (or stride) of an argument or result to `symbol`: `s0 = primals_2.size(0)`."""

    outside_captures: ClassVar[bool] = True
    symbol: sympy.Symbol
    variable: str
    dim: int | None = None  # None: the variable itself is the number
    stride: bool = False

    def reads(self, program: Program) -> tuple[str, ...]:
        return (self.variable,)

    def python(self, wrapper: PythonWrapper) -> list[str]:
        read = "" if self.dim is None else f".{'stride' if self.stride else 'size'}({self.dim})"
        return [f"{self.symbol} = {self.variable}{read}"]

    def add_to(self, wrapper: FxWrapper) -> None:
        size = wrapper.variable(self.variable)
        if self.dim is not None:
            read = torch.ops.aten.sym_stride.int if self.stride else torch.ops.aten.sym_size.int
            size = wrapper.call_function(read, size, self.dim)
        wrapper.sizes[self.symbol] = size


@dataclass(frozen=True, slots=True)
class ComputeSize(Instruction):
    """Computes a size from sizes of arguments: `extent0 = (s0 - 7) // 8`."""

    outside_captures: ClassVar[bool] = True
    symbol: sympy.Symbol
    value: sympy.Expr

    def python(self, wrapper: PythonWrapper) -> list[str]:
        return [f"{self.symbol} = {wrapper.size(self.value)}"]

    def add_to(self, wrapper: FxWrapper) -> None:
        wrapper.sizes[self.symbol] = wrapper.size(self.value)


@dataclass(frozen=True, slots=True)
class CheckInput(Instruction):
    """Checks that an argument has the traced layout: another layout is an error, never a wrong number.

    An argument of another dtype, or whose memory does not hold its numbers, is copied.
    """

    outside_captures: ClassVar[bool] = True
    variable: str
    layout: Layout

    def reads(self, program: Program) -> tuple[str, ...]:
        return (self.variable,)

    def python(self, wrapper: PythonWrapper) -> list[str]:
        name, size, stride = self.variable, *wrapper.shape(self.layout)
        dtype = self.layout.dtype
        differs = f"{name}.shape != {size} or {name}.stride() != {stride} or {name}.dtype != {dtype}"
        return [f"if {differs} or rt.is_lazy({name}): {name} = rt.checked({name!r}, {name}, {size}, {stride}, {dtype})"]

    def add_to(self, wrapper: FxWrapper) -> None:
        given = wrapper.env[self.variable]
        wrapper.env[self.variable] = wrapper.call_function(
            support.checked, self.variable, given, *wrapper.shape(self.layout), self.layout.dtype
        )


@dataclass(frozen=True, slots=True)
class Allocate(Instruction):
    """Allocates new memory for a buffer."""

    variable: str
    layout: Layout

    @property
    def device(self) -> torch.device:
        return self.layout.device

    def makes(self) -> tuple[str, ...]:
        return (self.variable,)

    def allocates(self, program: Program) -> tuple[tuple[str, sympy.Expr], ...]:
        return ((self.variable, self.layout.storage_bytes()),)

    def refusal(self, rules: Rules) -> str | None:
        return rules.layout(self.variable, self.layout)

    def python(self, wrapper: PythonWrapper) -> list[str]:
        return [f"{self.variable} = {wrapper.memory(self.device, wrapper.form(self.layout))}"]

    def tracked(self, wrapper: PythonWrapper, lines: list[str]) -> list[str]:
        form = f"{wrapper.form(self.layout)}, torch.device({str(self.device)!r})"
        size = wrapper.size(self.layout.storage_bytes())
        return [f"{self.variable} = life.allocate({self.variable!r}, {form}, {size})"]

    def add_to(self, wrapper: FxWrapper) -> None:
        options = {"dtype": self.layout.dtype, "device": self.device}
        wrapper.define(self.variable, torch.empty_strided, wrapper.shape(self.layout), options)


@dataclass(frozen=True, slots=True)
class AllocateArena(Instruction):
    """Allocates an arena, from which several buffers are carved."""

    outside_captures: ClassVar[bool] = True
    variable: str
    arena_device: torch.device
    bytes: int

    @property
    def device(self) -> torch.device:
        return self.arena_device

    def makes(self) -> tuple[str, ...]:
        return (self.variable,)

    def allocates(self, program: Program) -> tuple[tuple[str, sympy.Expr], ...]:
        return ((self.variable, sympy.Integer(self.bytes)),)

    def python(self, wrapper: PythonWrapper) -> list[str]:
        return [f"{self.variable} = {wrapper.memory(self.device, f'({self.bytes},), (1,), torch.uint8')}"]

    def tracked(self, wrapper: PythonWrapper, lines: list[str]) -> list[str]:
        return [*lines, f"life.allocated({self.variable!r}, {self.variable}, {self.bytes})"]


@dataclass(frozen=True, slots=True)
class Carve(Instruction):
    """Defines a buffer in an arena, `offset` bytes from its start."""

    outside_captures: ClassVar[bool] = True
    variable: str
    arena: str
    offset: int
    layout: Layout

    def reads(self, program: Program) -> tuple[str, ...]:
        return (self.arena,)

    def makes(self) -> tuple[str, ...]:
        return (self.variable,)

    def python(self, wrapper: PythonWrapper) -> list[str]:
        return [f"{self.variable} = rt.carve({self.arena}, {self.offset}, {wrapper.form(self.layout)})"]

    def tracked(self, wrapper: PythonWrapper, lines: list[str]) -> list[str]:
        return [*lines, f"life.carved({self.variable!r}, {self.variable})"]


@dataclass(frozen=True, slots=True)
class TakeOver(Instruction):
    """Reuses the memory of a dead buffer under a new name and layout of equal bytes."""

    variable: str
    source: str
    layout: Layout

    def reads(self, program: Program) -> tuple[str, ...]:
        return (self.source,)

    def makes(self) -> tuple[str, ...]:
        return (self.variable,)

    def frees(self) -> tuple[str, ...]:
        return (self.source,)

    def refusal(self, rules: Rules) -> str | None:
        return rules.layout(self.variable, self.layout)

    def python(self, wrapper: PythonWrapper) -> list[str]:
        taken = f"rt.take_over({self.source}, {wrapper.form(self.layout)})"
        return [f"{self.variable} = {taken}; del {self.source}"]

    def tracked(self, wrapper: PythonWrapper, lines: list[str]) -> list[str]:
        return [*lines, f"life.took_over({self.variable!r}, {self.source!r}, {self.variable})"]

    def add_to(self, wrapper: FxWrapper) -> None:
        taken = (wrapper.env[self.source], *wrapper.shape(self.layout), self.layout.dtype)
        wrapper.define(self.variable, support.strided_over, taken)


@dataclass(frozen=True, slots=True)
class Reuse(Instruction):
    """Reuses an argument's memory under another name if only this graph holds it at run time; else allocates memory.

    The argument stays a variable until it is freed, because the next launch reads it while it writes the new buffer.
    """

    variable: str
    source: str
    layout: Layout

    def reads(self, program: Program) -> tuple[str, ...]:
        return (self.source,)

    def makes(self) -> tuple[str, ...]:
        return (self.variable,)

    def allocates(self, program: Program) -> tuple[tuple[str, sympy.Expr], ...]:
        return ((self.variable, self.layout.storage_bytes()),)

    def python(self, wrapper: PythonWrapper) -> list[str]:
        return [f"{self.variable} = rt.reused({self.source}, {wrapper.form(self.layout)})"]

    def tracked(self, wrapper: PythonWrapper, lines: list[str]) -> list[str]:
        return [*lines, f"life.reused({self.variable!r}, {self.variable})"]


@dataclass(frozen=True, slots=True)
class Shared(Instruction):
    """Defines a buffer in memory that ranks share; `by(size, stride, dtype)` returns it."""

    variable: str
    layout: Layout
    by: Callable[..., Any]

    def makes(self) -> tuple[str, ...]:
        return (self.variable,)

    def python(self, wrapper: PythonWrapper) -> list[str]:
        return [f"{self.variable} = {wrapper.name_of(self.by, 'shard')}({wrapper.form(self.layout)})"]


@dataclass(frozen=True, slots=True)
class Launch(NodeInstruction):
    """Launches a generated kernel."""

    kernel: KernelSource
    op: Kernel
    variables: tuple[str, ...]  # one per `kernel.buffers`

    @property
    def device(self) -> torch.device:
        return self.op.device

    def mark(self, graph: str) -> Label:
        return Label(graph, "launch", self.op.name)

    def reads(self, program: Program) -> tuple[str, ...]:
        return self.variables

    def overwrites(self, program: Program) -> tuple[str, ...]:
        # If an output took over the memory of an argument, `variables` holds the output's name for both.
        written = self.written(program)
        return tuple(name for name in self.variables if name in written)

    def written(self, program: Program) -> list[str]:
        return [program.variables[name] for name in buffers_written(self.op)]

    def refusal(self, rules: Rules) -> str | None:
        return rules.launch(self)

    def python(self, wrapper: PythonWrapper) -> list[str]:
        sizes = [str(symbol) for symbol in self.kernel.sizes]
        call = f"{self.kernel.name}({', '.join([*self.variables, *sizes])})"
        return [f"# {wrapper.origin(self.op.origin)}", call]

    def tracked(self, wrapper: PythonWrapper, lines: list[str]) -> list[str]:
        return _tracked_use(self.op.name, lines, self.variables, self.written(wrapper.program))

    def add_to(self, wrapper: FxWrapper) -> None:
        wrapper.launch(self)


@dataclass(frozen=True, slots=True)
class Call(NodeInstruction):
    """Calls a library op or starts a collective. `results` assigns parts of the returned value to variables."""

    op: Extern
    results: tuple[tuple[str, tuple[int, ...]], ...]  # variable, path into the returned structure
    starts: bool = False

    @property
    def by_copies(self) -> bool:
        """Whether it starts a collective by copies, whose results are in the pool of a process group."""
        return isinstance(self.op.target, partial)

    def mark(self, graph: str) -> Label:
        if not self.starts:
            return Label(graph, "call", self.op.name)
        if isinstance(self.op.target, partial):
            start: Any = self.op.target.func  # `GraphCopies.start`
            works = start.__self__.events_in_trace(*self.op.target.args)
            return Label(graph, "start", self.op.name, works, f"@{start.__self__.pool.name}")
        each_by_itself = "reduce_scatter" in str(self.op.target) or self.op.target in WAITED_ONE_BY_ONE
        return Label(graph, "start", self.op.name, len(self.results) if each_by_itself else 1)

    def reads(self, program: Program) -> tuple[str, ...]:
        out = [self.op.result] if self.op.out else []
        return tuple(_variable(leaf, program) for leaf in (*inputs_of(self.op), *self.op.mutates, *out))

    def makes(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.results)

    def overwrites(self, program: Program) -> tuple[str, ...]:
        views = [*self.op.mutates, *([self.op.result] if self.op.out else [])]
        return tuple(_variable(view, program) for view in views)

    def allocates(self, program: Program) -> tuple[tuple[str, sympy.Expr], ...]:
        if self.op.out:
            return ()
        known = (name for name in self.makes() if name in program.layouts)
        return tuple((name, program.layouts[name].storage_bytes()) for name in known)

    def written(self, program: Program) -> list[str]:
        if self.starts:  # results are complete only after the wait
            return []
        if not self.op.out:
            return list(self.makes())
        return [program.variables[name] for name in buffers_written(self.op)]

    def refusal(self, rules: Rules) -> str | None:
        return rules.call(self)

    def python(self, wrapper: PythonWrapper) -> list[str]:
        called = wrapper.called(self.op)
        lines = [f"# {wrapper.origin(self.op.origin)}"]
        if not self.results or (self.op.out and isinstance(self.op.result, View)):
            return [*lines, called]
        if len(self.results) == 1 and self.results[0][1] == ():
            return [*lines, f"{self.results[0][0]} = {called}"]
        lines.append(f"returned = {called}")
        lines += [f"{name} = returned{''.join(f'[{at}]' for at in path)}" for name, path in self.results]
        return [*lines, "del returned"]

    def tracked(self, wrapper: PythonWrapper, lines: list[str]) -> list[str]:
        program, results = wrapper.program, self.makes()
        given = [program.variables[view.buffer] for view in views_in(self.op.arguments)]
        written = [program.variables[view.buffer] for view in self.op.mutates]
        if self.by_copies:
            return [*lines, f"life.lent({_by_name(results)})"]
        arrived = [] if self.op.out else [f"life.arrived({name!r}, {name})" for name in results]
        if self.starts:
            waited = [name for name in dict.fromkeys((*results, *written)) if name in wrapper.waited]
            started = f"{self.op.name!r}, {_by_name(given)}, {_by_name(results)}, {waited!r}"
            return [*lines, *arrived, f"life.started({started})"]
        if self.op.out and isinstance(self.op.result, View):
            written.append(program.variables[self.op.result.buffer])
        return _tracked_use(self.op.name, lines, (*given, *written), written) + arrived

    def add_to(self, wrapper: FxWrapper) -> None:
        wrapper.call(self)


@dataclass(frozen=True, slots=True)
class ExpectLayout(Instruction):
    """Copies the result of a call if its strides or dtype differ from the traced ones, on which kernels rely.

    A size that differs from the traced one is an error.
    """

    variable: str
    layout: Layout

    def reads(self, program: Program) -> tuple[str, ...]:
        return (self.variable,)

    def makes(self) -> tuple[str, ...]:
        return (self.variable,)

    def refusal(self, rules: Rules) -> str | None:
        return rules.layout(self.variable, self.layout)

    def python(self, wrapper: PythonWrapper) -> list[str]:
        name, size, stride = self.variable, *wrapper.shape(self.layout)
        return [f"{name} = rt.as_expected({name!r}, {name}, {size}, {stride}, {self.layout.dtype})"]

    def tracked(self, wrapper: PythonWrapper, lines: list[str]) -> list[str]:
        return [*lines, f"life.laid_out({self.variable!r}, {self.variable})"]

    def add_to(self, wrapper: FxWrapper) -> None:
        expected = (self.variable, wrapper.env[self.variable], *wrapper.shape(self.layout), self.layout.dtype)
        wrapper.define(self.variable, support.as_expected, expected, name=f"{self.variable}_laid_out")


@dataclass(frozen=True, slots=True)
class WaitFor(NodeInstruction):
    """Blocks the compute stream until the collective that fills `variable` is done."""

    variable: str
    op: Wait
    by: Callable[[], None] | None = None  # the function that blocks; None: the library's wait

    def mark(self, graph: str) -> Label:
        return Label(graph, "wait", self.op.name)

    def reads(self, program: Program) -> tuple[str, ...]:
        return (self.variable,)

    def written(self, program: Program) -> list[str]:
        return [self.variable]

    def python(self, wrapper: PythonWrapper) -> list[str]:
        if self.by is not None:
            return [f"{wrapper.name_of(self.by, 'wait')}()"]
        return [f"{wrapper.target(_WAIT)}({self.variable})"]

    def tracked(self, wrapper: PythonWrapper, lines: list[str]) -> list[str]:
        return lines if self.by is not None else [*lines, f"life.waited({self.variable!r}, {self.variable})"]

    def add_to(self, wrapper: FxWrapper) -> None:
        arrived = f"{self.variable}_arrived"
        wrapper.define(self.variable, _WAIT, (wrapper.env[self.variable],), name=arrived, origin=self.op.origin)


@dataclass(frozen=True, slots=True)
class Release(Instruction):
    """Tells the pool of a collective by copies that no later launch reads its results: their memory may be reused."""

    by: Callable[[], None]

    def python(self, wrapper: PythonWrapper) -> list[str]:
        return [f"{wrapper.name_of(self.by, 'release')}()"]


@dataclass(frozen=True, slots=True)
class Free(Instruction):
    """Deletes variables that no later instruction uses."""

    variables: tuple[str, ...]

    def reads(self, program: Program) -> tuple[str, ...]:
        return self.variables

    def frees(self) -> tuple[str, ...]:
        return self.variables

    def python(self, wrapper: PythonWrapper) -> list[str]:
        return [f"del {', '.join(self.variables)}"]

    def tracked(self, wrapper: PythonWrapper, lines: list[str]) -> list[str]:
        return [f"life.freeing({_by_name(self.variables)})", *lines, f"life.freed({list(self.variables)!r})"]

    def add_to(self, wrapper: FxWrapper) -> None:
        """Add nothing: FX drops a value after its last reader."""


@dataclass(frozen=True, slots=True)
class Return(Instruction):
    """Returns the graph's results: views, sizes and plain values."""

    outside_captures: ClassVar[bool] = True
    values: tuple[Any, ...]

    def reads(self, program: Program) -> tuple[str, ...]:
        return tuple(_variable(leaf, program) for leaf in named_in(self.values))

    def python(self, wrapper: PythonWrapper) -> list[str]:
        return wrapper.returning(self.values)

    def tracked(self, wrapper: PythonWrapper, lines: list[str]) -> list[str]:
        names = (wrapper.program.variables[view.buffer] for view in views_in(self.values))
        return [f"life.returned({_by_name(names)})", *lines]

    def add_to(self, wrapper: FxWrapper) -> None:
        wrapper.output(self.values)


OutputMemory = Allocate | TakeOver | Reuse | Shared


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions that a wrapper prints. `variables` maps buffers to variables, `layouts` variables to layouts."""

    name: str
    inputs: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    variables: Mapping[str, str]
    layouts: Mapping[str, Layout]
    constants: Mapping[str, Any]
    on_failure: tuple[Callable[[], None], ...] = ()  # called before an exception leaves the program

    def kernels(self) -> list[KernelSource]:
        """Return every kernel once, in the order of first launches."""
        launched = (item.kernel for item in self.instructions if isinstance(item, Launch))
        return list({kernel.name: kernel for kernel in launched}.values())

    def __str__(self) -> str:
        return "\n".join(str(item) for item in self.instructions)


def _variable(leaf: View | Handle, program: Program) -> str:
    return program.variables[leaf.buffer] if isinstance(leaf, View) else leaf.buffer


def _tracked_use(node: str, lines: list[str], touched: Iterable[str], written: Iterable[str]) -> list[str]:
    """Return `lines` with calls of the tracker: before them for all touched memory, after them for written memory."""
    written = tuple(dict.fromkeys(written))
    before = f"life.runs({node!r}, {_by_name(touched)}, {written!r})"
    return [before, *lines, *([f"life.ran({node!r}, {_by_name(written)})"] if written else [])]


def _by_name(names: Iterable[str]) -> str:
    """Return the source of a dict from names to variables: `{'a': a, 'b': b}`."""
    return "{" + ", ".join(f"{name!r}: {name}" for name in dict.fromkeys(names)) + "}"
