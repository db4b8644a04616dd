"""`Program` -> `torch.fx.GraphModule`: the same instructions as nodes, for tools that read or transform graphs.

Triton kernels are calls of torch's `triton_kernel_wrapper_mutation`, with grids computed from symbolic sizes by nodes;
kernels of other generators are calls of `overlapc::run_kernel`. Views, allocations, memory that is taken over, library
calls, collectives and their waits, and the graphs of conditionals are the nodes one expects. Nodes stand in the order
of the schedule; they carry the user's line. A variable's memory is freed by FX itself, after the last node that reads
it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.node import map_aggregate
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from overlapc.codegen.kernel import Launcher
from overlapc.codegen.program import (
    Allocate,
    BindSize,
    Call,
    CheckInput,
    ExpectLayout,
    Free,
    Instruction,
    Launch,
    Program,
    Return,
    TakeOver,
    WaitFor,
)
from overlapc.fx.versions import boxed
from overlapc.ir.ops import Handle, Layout, Provenance, View
from overlapc.runtime import kernel_op, support
from overlapc.runtime.triton_binary import stage_options
from overlapc.runtime.triton_kernel import ELEMENT
from overlapc.runtime.triton_kernel import Launch as TritonLaunch

_PLAIN = (int, float, bool, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class FxWrapper:
    """Turns a program into a graph: `bind` makes `module`, which takes the program's inputs one by one."""

    module: GraphModule

    def __init__(self, program: Program, *, single: bool = False) -> None:
        """single: the program returns one value, and the module that value itself: a loop's condition."""
        self.program = program
        self.single = single
        self.launchers: Mapping[str, Launcher] = {}
        self.graph = Graph()
        self.attributes: dict[str, Any] = {}
        self.attribute_of: dict[int, str] = {}  # by identity
        self.env: dict[str, Node] = {}  # node of a variable
        self.sizes: dict[sympy.Symbol, Any] = {}  # node, or number, of a symbol
        self.computed: dict[sympy.Expr, Any] = {}
        self.tracer = GraphAppendingTracer(self.graph)  # one for all: a call of two sizes takes no proxies of two

    def bind(self, launchers: Mapping[str, Launcher]) -> Callable[[list[Any]], tuple[Any, ...]]:
        """The graph as a function of one list of arguments, which it empties (boxed)."""
        self.launchers = launchers
        for name in self.program.inputs:
            self.env[name] = self.graph.placeholder(name)
        for item in self.program.instructions:
            self._add(item)
        self.graph.lint()
        self.module = GraphModule(self.attributes, self.graph, class_name=self.program.name)
        run = boxed(self.module)
        return lambda args: tuple(map(support.standing_alone, run(args)))

    def text(self) -> str:
        """The graph as Python, with the user's lines."""
        return str(self.module.print_readable(print_output=False))

    # --- instructions

    def _add(self, item: Instruction) -> None:
        if isinstance(item, BindSize):
            self.sizes[item.symbol] = self._bound(item)
        elif isinstance(item, CheckInput):
            self._call_function(support.check, item.variable, self.env[item.variable], *self._shape(item.layout))
        elif isinstance(item, Allocate):
            layout = item.layout
            options = {"dtype": layout.dtype, "device": layout.device}
            self.env[item.variable] = self._named(item.variable, torch.empty_strided, self._shape(layout), options)
        elif isinstance(item, TakeOver):
            args = (self.env[item.source], *self._shape(item.layout), item.layout.dtype)
            self.env[item.variable] = self._named(item.variable, support.strided_over, args)
        elif isinstance(item, Launch):
            self._launch(item)
        elif isinstance(item, WaitFor):
            wait = torch.ops._c10d_functional.wait_tensor.default
            self.env[item.variable] = self._located(
                self._named(f"{item.variable}_arrived", wait, (self.env[item.variable],)), item.op.origin
            )
        elif isinstance(item, Call):
            self._call(item)
        elif isinstance(item, ExpectLayout):
            expected = (item.variable, self.env[item.variable], *self._shape(item.layout))
            self.env[item.variable] = self._named(f"{item.variable}_laid_out", support.as_expected, expected)
        elif isinstance(item, Return):
            values = tuple(self.value(value) for value in item.values)
            self.graph.output(values[0] if self.single else values)
        else:
            assert isinstance(item, Free)  # FX forgets a value after its last reader

    def _bound(self, item: BindSize) -> Any:
        variable = self._variable(item.variable)
        if item.dim is None:
            return variable
        read = torch.ops.aten.sym_stride.int if item.stride else torch.ops.aten.sym_size.int
        return self._call_function(read, variable, item.dim)

    def _call(self, item: Call) -> None:
        op = item.op
        args, kwargs = self.value(tuple(op.args)), self.value(dict(op.kwargs))
        if op.out and isinstance(op.result, View):
            target = op.target.overloadpacket.out  # type: ignore[attr-defined]
            self._located(self._named(op.name, target, args, {**kwargs, "out": self.env[op.result.buffer]}), op.origin)
            return
        returned = self._located(self._named(op.name, op.target, args, kwargs), op.origin)
        for variable, path in item.results:
            node = returned
            for at in path:
                node = self._call_function(operator.getitem, node, at)
            self.env[variable] = node

    # --- kernels

    def _launch(self, item: Launch) -> None:
        tensors = [self._variable(variable) for variable in item.variables]
        sizes = [self.sizes[symbol] for symbol in item.kernel.sizes]
        if isinstance(item.kernel.launch, TritonLaunch):
            self._launch_triton(item, tensors, sizes)
            return
        kernel_op.register(item.kernel.name, self.launchers[item.kernel.name])
        run = torch.ops.overlapc.run_kernel.default
        self._located(self._call_function(run, item.kernel.name, tensors, sizes), item.op.origin)

    def _launch_triton(self, item: Launch, tensors: list[Node], sizes: list[Any]) -> None:
        """One node a stage; scratch memory between stages is allocated before them."""
        import triton.language as tl
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation

        launch: TritonLaunch = item.kernel.launch
        launcher: Any = self.launchers[item.kernel.name]
        device = item.op.device
        views = [  # Triton goes by a tensor's dtype
            tensor
            if self.program.layouts[variable].dtype is ELEMENT[pointer]
            else self._call_function(torch.ops.aten.view.dtype, tensor, ELEMENT[pointer])
            for variable, tensor, pointer in zip(item.variables, tensors, launch.pointers, strict=True)
        ]
        scratch = [
            self._call_function(torch.empty, self._size(count), dtype=dtype, device=device)
            for dtype, count in launch.scratch
        ]
        width = {} if launch.index_bounds is None else {"INDEX": tl.int64}  # how far indices reach only a run knows
        for function, stage in zip(launcher.functions, launch.stages, strict=True):
            given = dict(zip(function.arg_names, (*views, *scratch, *sizes), strict=False))
            node = self._call_function(
                triton_kernel_wrapper_mutation,
                kernel_idx=kernel_side_table.add_kernel(function),
                constant_args_idx=kernel_side_table.add_constant_args({**width, **stage_options(item.kernel, stage)}),
                grid=[(self._size(stage.programs), 1, 1)],
                tma_descriptor_metadata={},
                kwargs=given,
            )
            self._located(node, item.op.origin)

    # --- values

    def value(self, value: Any) -> Any:
        """An argument or result: nodes for what run time knows, Python values as they are."""

        def leaf(item: Any) -> Any:
            if isinstance(item, View):
                return self._view(item)
            if isinstance(item, Handle):
                return self._variable(item.buffer)
            if isinstance(item, sympy.Expr):
                return self._size(item)
            return item if isinstance(item, _PLAIN) else self._attribute(type(item).__name__, item)

        return map_aggregate(value, leaf)

    def _variable(self, name: str) -> Node:
        if name not in self.env:
            self.env[name] = self._attribute(name, self.program.constants[name])
        return self.env[name]

    def _view(self, view: View) -> Node:
        variable = self.program.variables[view.buffer]
        own = self.program.layouts[variable]
        node = self._variable(variable)
        if (own.size, own.stride) == (view.layout.size, view.layout.stride) and view.layout.offset == 0:
            return node
        return self._call_function(support.strided, node, *self._shape(view.layout), self._size(view.layout.offset))

    def _attribute(self, hint: str, value: Any) -> Node:
        name = self.attribute_of.setdefault(id(value), f"{hint}_{len(self.attributes)}")
        self.attributes[name] = value
        return self.graph.get_attr(name)

    def _shape(self, layout: Layout) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        size = tuple(self._size(extent) for extent in layout.size)
        return size, tuple(self._size(step) for step in layout.stride)

    def _size(self, expr: sympy.Expr) -> Any:
        """A number, or the node that computes it; equal sizes are computed once."""
        if expr.is_Integer:
            return int(expr)
        if expr not in self.computed:
            known = {
                symbol: Proxy(node, self.tracer) if isinstance(node, Node) else node
                for symbol, node in ((symbol, self.sizes[symbol]) for symbol in expr.free_symbols)
            }
            result = sympy_interp(PythonReferenceAnalysis, known, expr)
            self.computed[expr] = result.node if isinstance(result, Proxy) else result
        return self.computed[expr]

    # --- nodes

    def _call_function(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(target, args, kwargs)

    def _named(
        self, name: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Node:
        return self.graph.create_node("call_function", target, args, kwargs or {}, name=name)

    def _located(self, node: Node, origin: Provenance) -> Node:
        """Where the node comes from, as readers of graphs expect it."""
        if origin.source:
            path, _, rest = origin.source.partition(":")
            line, _, code = rest.partition(": ")
            node.stack_trace = f'  File "{path}", line {line}, in {origin.module or "forward"}\n    {code}'
        node.meta["overlapc_origin"] = origin.fx
        return node
