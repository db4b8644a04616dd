"""`Program` -> Python source of one function `call(args)`, and the callable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from overlapc.codegen.kernel import Launcher
from overlapc.codegen.objects import Boxed, function_of, rebuild, text_of
from overlapc.codegen.parts import Part, Partition
from overlapc.codegen.program import (
    Allocate,
    BindSize,
    Call,
    Carve,
    CheckInput,
    ExpectLayout,
    Free,
    Instruction,
    Launch,
    Pool,
    Program,
    Release,
    Return,
    Reuse,
    TakeOver,
    WaitFor,
)
from overlapc.ir.ops import Handle, Layout, Provenance, View, buffers_written, views_in
from overlapc.runtime import marks
from overlapc.runtime.collectives import gathers_apart

# What every printed module may call, by `objects.rebuild`.
_KNOWN: Mapping[str, str] = {
    "torch": "torch",
    "rt": "overlapc.runtime.support",
    "math": "math",
    "mark": "overlapc.runtime.marks:mark",
    "Lifecycle": "overlapc.runtime.lifecycle:Lifecycle",
    "values": "overlapc.runtime.values",
    "Parts": "overlapc.runtime.cuda_graphs:Parts",
}
_sizes = PythonPrinter()
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
# Matrix products by their public names, which find the op and convert its arguments in half an overload's time.
_PUBLIC = {getattr(torch.ops.aten, name).default: f"torch.{name}" for name in _PRODUCTS}


class PythonWrapper:
    """Prints a program. `source` is the module text: run with `objects` and the kernels' launchers, it has `call`.

    `call(args)` takes one list of arguments, which it empties (boxed).
    """

    def __init__(
        self,
        program: Program,
        *,
        marked: bool = False,
        tracked: bool = False,
        checks: frozenset[str] = frozenset(),
        partition: Partition | None = None,
    ) -> None:
        """marked: with a profiler's mark around every node (runtime/marks.py). tracked: every allocation and free is
        checked against the plan (runtime/lifecycle.py). checks: "nan", "inf" and "sync" look at each node after it ran
        (runtime/values.py). partition: the program as parts for CUDA graphs (runtime/cuda_graphs.py)."""
        self.program = program
        self.tracked = tracked
        self.checks = checks
        # One numbering with and without marks, so that both printings can share their objects.
        self.objects: dict[str, Any] = {name: rebuild(text) for name, text in _KNOWN.items()} | dict(program.constants)
        self.texts = dict(_KNOWN)  # how a later process finds them; "" where it cannot. Constants come with the graph
        self.names: dict[int, str] = {}
        self.devices: dict[torch.device, torch.device] = {}
        self.header: list[str] = []
        self.leaving = partition.leaving if partition is not None else ()
        self.called = {
            name
            for item in program.instructions
            if isinstance(item, Call) and getattr(item.op.target, "namespace", None) == "aten" and not item.op.out
            for name, _ in item.results
        }
        self.waited = {item.variable for item in program.instructions if isinstance(item, WaitFor)}
        self.source = self._module(partition.steps if partition is not None else program.instructions, marked)

    def bind(self, launchers: Mapping[str, Launcher]) -> Boxed:
        """The function, with kernels bound."""
        return function_of(self.source, f"<overlapc {self.program.name}>", {**self.objects, **launchers})

    def _module(self, steps: Sequence[Instruction | Part], marked: bool) -> str:
        device = first = next((found for found in map(_device_of, steps) if found is not None), None)
        looked_at = [item for item in steps if isinstance(item, CheckInput)]
        functions: list[str] = []
        body: list[str] = []
        # In the program's order: names of objects count up as they are met.
        for item in steps:
            if isinstance(item, CheckInput):
                body += self._layouts(looked_at) if item is looked_at[0] else []
                continue
            wanted = _device_of(item)
            if wanted not in (None, device):
                device = wanted
                body.append(f"rt.enter_device({device})")
            if isinstance(item, Part):
                functions += self._function(item)
            body += self._calling(item) if isinstance(item, Part) else self._lines(item, marked)
        if first is not None:
            body = _on_device(first, body)
        if self.program.on_failure:
            told = [f"{self._object(each, 'failed')}()" for each in self.program.on_failure]
            body = ["try:", *_indented(body), "except BaseException:", *_indented([*told, "raise"])]
        if any(isinstance(item, Call | WaitFor) for item in self.program.instructions):
            body = ["with rt.below_autograd():", *_indented(body)]
        return "\n".join([*self._head(functions), *_indented(body), ""])

    def _head(self, functions: list[str]) -> list[str]:
        lines = [f"# overlapc: {self.program.name}", *self.header]
        if functions:
            lines += ["", f"parts = Parts({self.program.name!r})", *functions]
        lines += ["", "", "def call(args):"]
        tracker = [f"life = Lifecycle({self.program.name!r}, args)"] if self.tracked else []
        return [*lines, *_indented(_unpacked(self.program.inputs, *tracker))]

    def _function(self, part: Part) -> list[str]:
        """The definition of a captured part."""
        inner, written = (
            [at for at, name in enumerate(part.inputs) if name in names] for names in (part.inner, part.written)
        )
        body = [line for item in part.instructions for line in self._print(item)]
        lines = [*_unpacked(part.inputs), *body, f"return {_tuple(part.outputs)}"]
        decorated = f"@parts.part(inner={inner}, written={written})"
        return ["", "", decorated, f"def {part.name}(args):", *_indented(lines)]

    def _calling(self, part: Part) -> list[str]:
        box = f"box = [{', '.join(part.inputs)}]"
        drops = [f"del {', '.join(sorted(part.freed))}"] if part.freed else []
        results = f"{_tuple(part.outputs)} = " if part.outputs else ""
        return [box, *drops, f"{results}{part.name}(box)"]

    def _lines(self, item: Instruction, marked: bool) -> list[str]:
        lines = self._in_mark(item) if marked else self._print(item)
        if self.checks and isinstance(item, Launch | Call | WaitFor):
            lines = [*lines, *self._checking(item)]
        return self._tracking(item, lines) if self.tracked else lines

    def _checking(self, item: Launch | Call | WaitFor) -> list[str]:
        where = f"{self.program.name + ': ' + item.op.name!r}, {_origin(item.op.origin)!r}"
        lines = [f"values.synchronize({where})"] if "sync" in self.checks else []
        kinds = tuple(sorted(self.checks & {"nan", "inf"}))
        if isinstance(item, WaitFor):
            written = [item.variable]
        elif isinstance(item, Call) and item.starts:  # it arrives at the wait
            written = []
        elif isinstance(item, Call) and not item.op.out:
            written = [name for name, _ in item.results]
        else:
            written = [self.program.variables[name] for name in buffers_written(item.op)]
        if kinds and written:
            named = ", ".join(f"{name}={name}" for name in dict.fromkeys(written))
            lines.append(f"values.check({where}, {kinds!r}, {named})")
        return lines

    def _tracking(self, item: Instruction, lines: list[str]) -> list[str]:
        """`lines` of `item`, with what the tracker is told before and after them."""
        if isinstance(item, Allocate):
            layout = item.layout
            device = f"torch.device({str(layout.device)!r})"
            form = f"{self._shape(layout.size)}, {self._shape(layout.stride)}, {layout.dtype}, {device}"
            size = self._size(layout.storage_bytes())
            return [f"{item.variable} = life.allocate({item.variable!r}, {form}, {size})"]
        if isinstance(item, Pool):
            return [*lines, f"life.allocated({item.variable!r}, {item.variable}, {item.bytes})"]
        if isinstance(item, Carve):
            return [*lines, f"life.carved({item.variable!r}, {item.variable})"]
        if isinstance(item, Reuse):
            return [*lines, f"life.reused({item.variable!r}, {item.variable})"]
        if isinstance(item, TakeOver):
            return [*lines, f"life.took_over({item.variable!r}, {item.source!r}, {item.variable})"]
        if isinstance(item, Launch):
            return self._using(item, lines, item.variables, self._variables(buffers_written(item.op)))
        if isinstance(item, Call):
            return self._tracking_call(item, lines)
        if isinstance(item, WaitFor):
            return [*lines, *([f"life.waited({item.variable!r}, {item.variable})"] if item.by is None else [])]
        if isinstance(item, Free):
            return [f"life.freeing({_by_name(item.variables)})", *lines, f"life.freed({list(item.variables)!r})"]
        if isinstance(item, Return):
            names = self._variables(view.buffer for view in views_in(item.values))
            return [f"life.returned({_by_name(names)})", *lines]
        return lines

    def _tracking_call(self, item: Call, lines: list[str]) -> list[str]:
        given = self._variables(view.buffer for view in views_in(item.op.arguments))
        written = self._variables(view.buffer for view in item.op.mutates)
        results = [name for name, _ in item.results]
        if isinstance(item.op.target, partial):  # copies, in memory that the pool of a group keeps
            return [*lines, f"life.lent({_by_name(results)})"]
        arrived = [] if item.op.out else [f"life.arrived({name!r}, {name})" for name in results]
        if item.starts:
            waited = [name for name in (*results, *written) if name in self.waited]
            started = f"{item.op.name!r}, {_by_name(given)}, {_by_name(results)}, {waited!r}"
            return [*lines, *arrived, f"life.started({started})"]
        if item.op.out and isinstance(item.op.result, View):
            written = (*written, *self._variables([item.op.result.buffer]))
        return self._using(item, lines, (*given, *written), written) + arrived

    def _using(
        self, item: Launch | Call, lines: list[str], touched: Iterable[str], written: Iterable[str]
    ) -> list[str]:
        node, written = repr(item.op.name), tuple(dict.fromkeys(written))
        before = f"life.runs({node}, {_by_name(touched)}, {written!r})"
        return [before, *lines, *([f"life.ran({node}, {_by_name(written)})"] if written else [])]

    def _variables(self, buffers: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.program.variables[name] for name in buffers))

    def _layouts(self, items: list[CheckInput]) -> list[str]:
        """All at once where that is possible: each by itself only for the first call, and where something differs."""
        lines = [line for item in items for line in self._print(item)]
        extents = [extent for item in items for extent in (*item.layout.size, *item.layout.stride)]
        if len(items) < 2 or any(extent.free_symbols for extent in extents):
            return lines
        names = ", ".join(item.variable for item in items)
        self.header.append("layouts = rt.Layouts()")
        return [f"if not layouts.known({names}):", *_indented(lines), f"    layouts.learn({names})"]

    # --- instructions

    def _print(self, item: Instruction) -> list[str]:
        if isinstance(item, BindSize):
            return [f"{item.symbol} = {self._bound(item)}"]
        if isinstance(item, CheckInput):
            size, stride = self._shape(item.layout.size), self._shape(item.layout.stride)
            name = item.variable
            check = f"rt.check({name!r}, {name}, {size}, {stride})"
            return [f"if {name}.shape != {size} or {name}.stride() != {stride}: {check}"]
        if isinstance(item, Allocate):
            return [f"{item.variable} = {self._empty(item.layout)}"]
        if isinstance(item, Pool):
            return [f"{item.variable} = {self._memory(item.device, f'({item.bytes},), (1,), torch.uint8')}"]
        if isinstance(item, Carve):
            shape = f"{self._shape(item.layout.size)}, {self._shape(item.layout.stride)}, {item.layout.dtype}"
            return [f"{item.variable} = rt.carve({item.pool}, {item.offset}, {shape})"]
        if isinstance(item, TakeOver):
            size, stride = self._shape(item.layout.size), self._shape(item.layout.stride)
            taken = f"rt.take_over({item.source}, {size}, {stride}, {item.layout.dtype})"
            return [f"{item.variable} = {taken}; del {item.source}"]
        if isinstance(item, Reuse):
            size, stride = self._shape(item.layout.size), self._shape(item.layout.stride)
            return [f"{item.variable} = rt.reused({item.source}, {size}, {stride}, {item.layout.dtype})"]
        if isinstance(item, Launch):
            sizes = [str(symbol) for symbol in item.kernel.sizes]
            call = f"{item.kernel.name}({', '.join([*item.variables, *sizes])})"
            return [f"# {_origin(item.op.origin)}", call]
        if isinstance(item, WaitFor) and item.by is not None:
            return [f"{self._object(item.by, 'wait')}()"]
        if isinstance(item, Release):
            return [f"{self._object(item.by, 'release')}()"]
        if isinstance(item, WaitFor):
            return [f"{self._target(torch.ops._c10d_functional.wait_tensor.default)}({item.variable})"]
        if isinstance(item, Free):
            return [f"del {', '.join(item.variables)}"]
        if isinstance(item, Call):
            return [f"# {_origin(item.op.origin)}", *self._call(item)]
        if isinstance(item, ExpectLayout):
            size, stride = self._shape(item.layout.size), self._shape(item.layout.stride)
            return [f"{item.variable} = rt.as_expected({item.variable!r}, {item.variable}, {size}, {stride})"]
        assert isinstance(item, Return)
        values = [self._returned(value) for value in item.values]
        left = _tuple(self.leaving)
        copies = [f"{left} = parts.copied{left}"] if self.leaving else []
        return [*copies, f"return ({', '.join(values)}{',' if len(values) == 1 else ''})"]

    def _returned(self, value: Any) -> str:
        """`value`; some of torch's own ops (`slice_scatter`) give a view of what they copied."""
        text = self.value(value)
        return f"rt.standing_alone({text})" if text in self.called else text

    def _in_mark(self, item: Instruction) -> list[str]:
        if not isinstance(item, Launch | Call | WaitFor):
            return self._print(item)
        how = "launch" if isinstance(item, Launch) else "wait" if isinstance(item, WaitFor) else "call"
        works = 1
        if isinstance(item, Call) and item.starts:
            how = "start"
            if isinstance(item.op.target, partial):  # copies, which are no work of gloo's
                works = 0
            elif "reduce_scatter" in str(item.op.target) or item.op.target is gathers_apart:
                works = len(item.results)
        label = marks.Label(self.program.name, how, item.op.name, works)
        return [f"with mark({str(label)!r}):", *_indented(self._print(item))]

    def _bound(self, item: BindSize) -> str:
        if item.dim is None:
            return item.variable
        return f"{item.variable}.{'stride' if item.stride else 'size'}({item.dim})"

    def _call(self, item: Call) -> list[str]:
        op = item.op
        args = [self.value(arg) for arg in op.args]
        args += [f"{name}={self.value(arg)}" for name, arg in op.kwargs.items()]
        if op.out and isinstance(op.result, View):
            target = _PUBLIC.get(op.target) or self._target(op.target.overloadpacket.out)  # type: ignore[attr-defined]
            return [f"{target}({', '.join([*args, f'out={op.result.buffer}'])})"]
        called = f"{self._target(op.target)}({', '.join(args)})"
        if not item.results:
            return [called]
        if len(item.results) == 1 and item.results[0][1] == ():
            lines = [f"{item.results[0][0]} = {called}"]
        else:
            lines = [f"returned = {called}"]
            lines += [f"{name} = returned{''.join(f'[{at}]' for at in path)}" for name, path in item.results]
            lines.append("del returned")
        return lines

    # --- values

    def value(self, value: Any) -> str:
        """An argument or result as an expression."""
        if isinstance(value, View):
            return self._view(value)
        if isinstance(value, Handle):
            return value.buffer
        if isinstance(value, sympy.Expr):
            return self._size(value)
        if isinstance(value, tuple | list):
            inner = ", ".join(self.value(item) for item in value)
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self.value(item)}" for key, item in value.items()) + "}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if isinstance(value, torch.device):
            return self._device(value)
        if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.layout):
            return repr(value)
        if isinstance(value, torch.memory_format):
            return str(value)
        if isinstance(value, torch._ops.OpOverload):  # what a wrapping op calls; the graph may call it, too
            return self._target(value)
        return self._object(value, "object")

    def _view(self, view: View) -> str:
        variable = self.program.variables[view.buffer]
        own = self.program.layouts[variable]
        if (own.size, own.stride) == (view.layout.size, view.layout.stride) and view.layout.offset == 0:
            return variable
        size, stride = self._shape(view.layout.size), self._shape(view.layout.stride)
        return f"rt.view({variable}, {size}, {stride}, {self._size(view.layout.offset)})"

    def _empty(self, layout: Layout) -> str:
        return self._memory(layout.device, f"{self._shape(layout.size)}, {self._shape(layout.stride)}, {layout.dtype}")

    def _memory(self, device: torch.device, form: str) -> str:
        """New memory; `form` is its size, stride and dtype."""
        if device.type in ("cpu", "cuda"):
            return f"rt.empty_{device.type}({form})"
        return f"rt.empty({form}, {self._device(device)})"

    def _device(self, device: torch.device) -> str:
        """Made once, not by every call; one name for all that are equal."""
        return self._object(self.devices.setdefault(device, device), str(device).replace(":", ""))

    def _shape(self, sizes: tuple[sympy.Expr, ...]) -> str:
        return f"({', '.join(self._size(size) for size in sizes)}{',' if len(sizes) == 1 else ''})"

    def _size(self, expr: sympy.Expr) -> str:
        return str(_sizes.doprint(expr))

    def _target(self, target: Any) -> str:
        if isinstance(target, torch._ops.OpOverload):
            path = str(target)  # "aten.mm.default"
            name = path.replace(".", "_").replace("::", "_")
            if id(target) not in self.names:
                self.names[id(target)] = name
                self.objects[name] = target
                self.texts[name] = text_of(target)
                self.header.append(f"{name} = torch.ops.{path}")
            return name
        return self._object(target, getattr(target, "__name__", "target"))

    def _object(self, value: Any, hint: str) -> str:
        if id(value) not in self.names:
            hint = "".join(c if c.isalnum() else "_" for c in hint)
            name = f"{hint}_{len(self.objects)}"
            self.names[id(value)] = name
            self.objects[name] = value
            self.texts[name] = text_of(value)
            self.header.append(f"# {name}: {str(value).splitlines()[0][:100]}")
        return self.names[id(value)]


def _device_of(item: Instruction | Part) -> int | None:
    """The GPU that must be current for `item`; None where that does not matter."""
    if isinstance(item, Part):
        return next((found for found in map(_device_of, item.instructions) if found is not None), None)
    if isinstance(item, Allocate):
        device = item.layout.device
    elif isinstance(item, Pool):
        device = item.device
    elif isinstance(item, Launch):
        device = item.op.device
    else:
        return None
    return device.index if device.type == "cuda" else None


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _on_device(index: int, body: list[str]) -> list[str]:
    """`body` with a GPU current, and afterwards the one that was."""
    return [f"before = rt.enter_device({index})", "try:", *_indented(body), "finally:", "    rt.enter_device(before)"]


def _by_name(names: Iterable[str]) -> str:
    """`{'a': a, 'b': b}`."""
    return "{" + ", ".join(f"{name!r}: {name}" for name in dict.fromkeys(names)) + "}"


def _tuple(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _unpacked(names: tuple[str, ...], *then: str) -> list[str]:
    """The first lines of a function that takes a list of arguments and empties it."""
    trailing = "," if len(names) == 1 else ""
    return [*([f"{', '.join(names)}{trailing} = args"] if names else []), *then, "args.clear()"]


def _origin(origin: Provenance) -> str:
    shown = " ".join(origin.fx[:8]) + (" …" if len(origin.fx) > 8 else "")
    where = f" | {origin.module}" if origin.module else ""
    return f"{shown}{where}" + (f" | {origin.source}" if origin.source else "")
