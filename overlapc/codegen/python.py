"""`Program` -> Python source of one function `call(args)`, and the callable."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from overlapc.codegen.generators import Launcher
from overlapc.codegen.objects import Boxed, function_of, rebuild, text_of
from overlapc.codegen.parts import CapturedPart, Partition
from overlapc.codegen.program import (
    Call,
    CheckInput,
    Instruction,
    NodeInstruction,
    Program,
    WaitFor,
)
from overlapc.ir.ops import Extern, Handle, Layout, Provenance, Returned, View

# Names that every printed module may use -> text for `objects.rebuild`.
_KNOWN: Mapping[str, str] = {
    "torch": "torch",
    "rt": "overlapc.runtime.support",
    "math": "math",
    "mark": "overlapc.runtime.marks:mark",
    "Lifecycle": "overlapc.runtime.lifecycle:Lifecycle",
    "values": "overlapc.runtime.check_values",
    "Parts": "overlapc.runtime.cuda_graphs:Parts",
}
FIXED_NAMES = frozenset(_KNOWN) | frozenset("args before box call layouts life parts returned".split())
"""Names that a generated module uses besides those of nodes, so no node may have them."""
_sizes = PythonPrinter()
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
# Matrix products are called by their public names: dispatching these takes half the host time of an overload.
_PUBLIC = {getattr(torch.ops.aten, name).default: f"torch.{name}" for name in _PRODUCTS}


class PythonWrapper:
    """Prints a program as a Python module, `source`, which uses `objects` and the kernels' launchers by name.

    The module defines `call(args)`, which takes one list of arguments and empties it (boxed).
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
        """Print `program`.

        marked: put a profiler mark around every node (runtime/marks.py).
        tracked: check every allocation and free against the plan (runtime/lifecycle.py).
        checks: any of "nan", "inf" and "sync", applied after each node (runtime/check_values.py).
        partition: the program split into parts for CUDA graphs (runtime/cuda_graphs.py).
        """
        self.program = program
        self.tracked = tracked
        self.checks = checks
        # Numbered the same with and without marks, so that both sources can share their objects.
        self.objects: dict[str, Any] = {name: rebuild(text) for name, text in _KNOWN.items()} | dict(program.constants)
        self.texts = dict(_KNOWN)  # for `objects.rebuild` in another process; "" if it cannot. Without constants
        self.names: dict[int, str] = {}
        self.devices: dict[torch.device, torch.device] = {}
        self.header: list[str] = []
        self.leaving = partition.leaving if partition is not None else ()
        self.results_of_aten = {
            name
            for item in program.instructions
            if isinstance(item, Call) and getattr(item.op.target, "namespace", None) == "aten" and not item.op.out
            for name, _ in item.results
        }
        self.variables = set(program.inputs).union(*(item.makes() for item in program.instructions))
        self.waited = {item.variable for item in program.instructions if isinstance(item, WaitFor)}
        self.source = self._module(partition.steps if partition is not None else program.instructions, marked)

    def function(self, launchers: Mapping[str, Launcher]) -> Boxed:
        """Execute the module and return its `call`, which uses these launchers."""
        return function_of(self.source, f"<overlapc {self.program.name}>", {**self.objects, **launchers})

    def _module(self, steps: Sequence[Instruction | CapturedPart], marked: bool) -> str:
        device = first = next((found for found in map(_gpu, steps) if found is not None), None)
        input_checks = [item for item in steps if isinstance(item, CheckInput)]
        functions: list[str] = []
        body: list[str] = []
        # In program order, because objects are numbered at their first use.
        for item in steps:
            if isinstance(item, CheckInput):
                body += self._layouts(input_checks) if item is input_checks[0] else []
                continue
            wanted = _gpu(item)
            if wanted not in (None, device):
                device = wanted
                body.append(f"rt.enter_device({device})")
            if isinstance(item, CapturedPart):
                functions += self._function(item)
            body += self._calling(item) if isinstance(item, CapturedPart) else self._lines(item, marked)
        if first is not None:
            body = _on_device(first, body)
        if self.program.on_failure:
            calls = [f"{self.name_of(function, 'failed')}()" for function in self.program.on_failure]
            body = ["try:", *_indented(body), "except BaseException:", *_indented([*calls, "raise"])]
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

    def _function(self, part: CapturedPart) -> list[str]:
        """Return the definition of a captured part."""
        inner, written = (
            [at for at, name in enumerate(part.inputs) if name in names] for names in (part.inner, part.written)
        )
        body = [line for item in part.instructions for line in item.python(self)]
        lines = [*_unpacked(part.inputs), *body, f"return {_tuple(part.outputs)}"]
        decorated = f"@parts.part(inner={inner}, written={written})"
        return ["", "", decorated, f"def {part.name}(args):", *_indented(lines)]

    def _calling(self, part: CapturedPart) -> list[str]:
        box = f"box = [{', '.join(part.inputs)}]"
        drops = [f"del {', '.join(sorted(part.freed))}"] if part.freed else []
        results = f"{_tuple(part.outputs)} = " if part.outputs else ""
        return [box, *drops, f"{results}{part.name}(box)"]

    def _lines(self, item: Instruction, marked: bool) -> list[str]:
        lines = item.python(self)
        if isinstance(item, NodeInstruction):
            if marked:
                lines = [f"with mark({str(item.mark(self.program.name))!r}):", *_indented(lines)]
            if self.checks:
                lines = [*lines, *self._checking(item)]
        return item.tracked(self, lines) if self.tracked else lines

    def _checking(self, item: NodeInstruction) -> list[str]:
        where = f"{self.program.name + ': ' + item.op.name!r}, {self.origin(item.op.origin)!r}"
        lines = [f"values.synchronize({where})"] if "sync" in self.checks else []
        kinds = tuple(sorted(self.checks & {"nan", "inf"}))
        written = item.written(self.program)
        if kinds and written:
            named = ", ".join(f"{name}={name}" for name in dict.fromkeys(written))
            lines.append(f"values.check({where}, {kinds!r}, {named})")
        return lines

    def _layouts(self, items: list[CheckInput]) -> list[str]:
        """Return the lines that check the layouts of arguments.

        If all sizes are static, one call compares all layouts with those that passed before; arguments are checked one
        by one only in the first call and where that comparison fails.
        """
        lines = [line for item in items for line in item.python(self)]
        extents = [extent for item in items for extent in (*item.layout.size, *item.layout.stride)]
        if len(items) < 2 or any(extent.free_symbols for extent in extents):
            return lines
        names = ", ".join(item.variable for item in items)
        self.header.append("layouts = rt.Layouts()")
        return [f"if not layouts.known({names}):", *_indented(lines), f"    layouts.learn({names})"]

    # --- helpers that instructions use to print themselves

    def called(self, op: Extern) -> str:
        """Return the call of `op`; its result may be written into allocated memory (`out=`)."""
        args = [self.value(arg) for arg in op.args]
        args += [f"{name}={self.value(arg)}" for name, arg in op.kwargs.items()]
        if op.out and isinstance(op.result, View):
            target = _PUBLIC.get(op.target) or self.target(op.target.overloadpacket.out)  # type: ignore[attr-defined]
            return f"{target}({', '.join([*args, f'out={op.result.buffer}'])})"
        return f"{self.target(op.target)}({', '.join(args)})"

    def returning(self, values: tuple[Any, ...]) -> list[str]:
        """Return the lines that return `values`."""
        left = _tuple(self.leaving)
        copies = [f"{left} = parts.copied{left}"] if self.leaving else []
        views = [self.program.variables[value.buffer] for value in values if isinstance(value, View)]
        count = Counter([*self.program.inputs, *views])
        return [*copies, f"return {_tuple([self._returned(value, count) for value in values])}"]

    def _unused(self, name: str) -> str:
        while name in self.variables:
            name += "_"
        return name

    def _returned(self, value: Any, count: Mapping[str, int]) -> str:
        """Return the source of a returned value. count: tensors that the caller gets or has, by variable.

        Those in the memory of one variable share its version counter: autograd then notices if the user changes one of
        them in place and backward reads another. To autograd, no result is a view.
        """
        text = self.value(value)
        variable = self.program.variables[value.buffer] if isinstance(value, View) else ""
        if isinstance(value, Returned) or (count[variable] > 1 and text != variable):
            return f"rt.counted_with({variable}, {text})"
        return f"rt.standing_alone({text})" if text in self.results_of_aten else text

    def memory(self, device: torch.device, form: str) -> str:
        """Return the expression that allocates memory; `form` is its size, stride and dtype."""
        if device.type in ("cpu", "cuda"):
            return f"rt.empty_{device.type}({form})"
        return f"rt.empty({form}, {self._device(device)})"

    def form(self, layout: Layout) -> str:
        """Return the source of size, stride and dtype."""
        return f"{', '.join(self.shape(layout))}, {layout.dtype}"

    def shape(self, layout: Layout) -> tuple[str, str]:
        """Return the sources of size and stride."""
        return self._sizes(layout.size), self._sizes(layout.stride)

    def size(self, expr: sympy.Expr) -> str:
        """Return the source of a size: a number, or an expression over symbols that are defined before."""
        return str(_sizes.doprint(expr))

    def target(self, target: Any) -> str:
        """Return the name under which this module calls `target`."""
        if isinstance(target, torch._ops.OpOverload):
            path = str(target)  # "aten.mm.default"
            name = path.replace(".", "_").replace("::", "_")
            if id(target) not in self.names:
                self.names[id(target)] = name
                self.objects[name] = target
                self.texts[name] = text_of(target)
                self.header.append(f"{name} = torch.ops.{path}")
            return name
        return self.name_of(target, getattr(target, "__name__", "target"))

    def name_of(self, value: Any, hint: str) -> str:
        """Return the name of an object in this module; a new name begins with `hint`."""
        if id(value) not in self.names:
            hint = "".join(c if c.isalnum() else "_" for c in hint)
            name = self._unused(f"{hint}_{len(self.objects)}")  # the node of `s0 > 20` may be gt_11
            self.names[id(value)] = name
            self.objects[name] = value
            self.texts[name] = text_of(value)
            self.header.append(f"# {name}: {str(value).splitlines()[0][:100]}")
        return self.names[id(value)]

    @staticmethod
    def origin(origin: Provenance) -> str:
        """Return FX nodes, module and source line, for a comment."""
        shown = " ".join(origin.fx[:8]) + (" …" if len(origin.fx) > 8 else "")
        where = f" | {origin.module}" if origin.module else ""
        return f"{shown}{where}" + (f" | {origin.source}" if origin.source else "")

    # --- values

    def value(self, value: Any) -> str:
        """Return the source of an argument or result."""
        if isinstance(value, View):
            return self._view(value)
        if isinstance(value, Handle):
            return value.buffer
        if isinstance(value, sympy.Expr):
            return self.size(value)
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
        if isinstance(value, torch._ops.OpOverload):  # the op behind a wrapping op; the graph may call it, too
            return self.target(value)
        return self.name_of(value, "object")

    def _view(self, view: View) -> str:
        variable = self.program.variables[view.buffer]
        own = self.program.layouts[variable]
        if isinstance(view, Returned):
            text = self._view(View(view.buffer, view.layout))
            text = f"{text}.conj()" if view.conjugated else text
            return f"torch._neg_view({text})" if view.negated else text
        if view.dtype != own.dtype:
            variable = f"rt.as_dtype({variable}, {view.dtype})"
        elif (own.size, own.stride) == (view.layout.size, view.layout.stride) and view.layout.offset == 0:
            return variable
        size, stride = self.shape(view.layout)
        return f"rt.view({variable}, {size}, {stride}, {self.size(view.layout.offset)})"

    def _device(self, device: torch.device) -> str:
        """Return the name of a device object, which is created once and shared by all equal devices."""
        return self.name_of(self.devices.setdefault(device, device), str(device).replace(":", ""))

    def _sizes(self, sizes: tuple[sympy.Expr, ...]) -> str:
        return _tuple([self.size(size) for size in sizes])


def _gpu(item: Instruction | CapturedPart) -> int | None:
    """Return the index of the GPU that must be current for `item`; None if that does not matter."""
    if isinstance(item, CapturedPart):
        return next((found for found in map(_gpu, item.instructions) if found is not None), None)
    return item.device.index if item.device is not None and item.device.type == "cuda" else None


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _on_device(index: int, body: list[str]) -> list[str]:
    """Return `body` with GPU `index` current inside and the previous one restored afterwards."""
    return [f"before = rt.enter_device({index})", "try:", *_indented(body), "finally:", "    rt.enter_device(before)"]


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _unpacked(names: tuple[str, ...], *then: str) -> list[str]:
    """Return the first lines of a function that takes a list of arguments and empties it; `then` comes in between."""
    trailing = "," if len(names) == 1 else ""
    return [*([f"{', '.join(names)}{trailing} = args"] if names else []), *then, "args.clear()"]
