"""`Program` -> `torch.fx.GraphModule`: the same instructions as nodes, for tools that read or transform graphs.

Triton kernels are calls of torch's `triton_kernel_wrapper_mutation`, with grids computed from symbolic sizes by nodes;
kernels of other generators are calls of `overlapc::run_kernel`. Views, allocations, reused memory, library calls,
collectives, waits and the graphs of conditionals are ordinary nodes. Nodes are in schedule order and carry the user's
source line. FX itself frees a variable's memory after the last node that reads it.
"""

from __future__ import annotations

import math
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

from overlapc.codegen.generators import Launcher
from overlapc.codegen.program import Call, Launch, Program
from overlapc.fx.versions.graphs import boxed
from overlapc.ir.ops import Handle, Layout, Provenance, Returned, View
from overlapc.runtime import kernel_op, support
from overlapc.runtime.triton_binary import stage_options
from overlapc.runtime.triton_kernel import ELEMENT, TritonLaunch

_PLAIN = (int, float, bool, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


def _traced(function: Callable[..., Any], arguments: int) -> staticmethod[..., Any]:
    """Return `function` of its first `arguments`, as a node of the graph if one of them is a node."""

    def call(*args: Any) -> Any:
        values = args[:arguments]
        tracer = next((value.tracer for value in values if isinstance(value, Proxy)), None)
        if tracer is None:
            return function(*values)
        return tracer.create_proxy("call_function", function, values, {})

    return staticmethod(call)


class _SizeArithmetic(PythonReferenceAnalysis):
    """Arithmetic on sizes, some of which are nodes. torch's own has no division of integers that yields a float, and
    rounds only numbers."""

    int_truediv = _traced(operator.truediv, 2)
    trunc_to_int = _traced(math.trunc, 1)
    floor_to_int = _traced(math.floor, 1)
    ceil_to_int = _traced(math.ceil, 1)
    round_to_int = _traced(round, 1)


class FxWrapper:
    """Turns a program into a graph: `function` makes `module`, which takes the program's inputs one by one."""

    module: GraphModule

    def __init__(self, program: Program, *, single: bool = False) -> None:
        """single: the program returns one value, and the module returns it without a tuple (a loop's condition)."""
        self.program = program
        self.single = single
        self.launchers: Mapping[str, Launcher] = {}
        self.graph = Graph()
        self.attributes: dict[str, Any] = {}
        self.attribute_of: dict[int, str] = {}  # id of an object -> attribute that holds it
        self.env: dict[str, Node] = {}  # variable -> its node
        self.sizes: dict[sympy.Symbol, Any] = {}  # symbol -> its node, or a number
        self.computed: dict[sympy.Expr, Any] = {}
        self.tracer = GraphAppendingTracer(self.graph)  # shared: one call cannot take proxies of two tracers

    def function(self, launchers: Mapping[str, Launcher]) -> Callable[[list[Any]], tuple[Any, ...]]:
        """Build the graph and return it as a function of one list of arguments, which it empties (boxed)."""
        self.launchers = launchers
        for name in self.program.inputs:
            self.env[name] = self.graph.placeholder(name)
        for item in self.program.instructions:
            item.add_to(self)
        self.graph.lint()
        self.module = GraphModule(self.attributes, self.graph, class_name=self.program.name)
        return support.returning_alone(boxed(self.module))

    def text(self) -> str:
        """Return the graph as Python source with the user's source lines."""
        return str(self.module.print_readable(print_output=False))

    # --- instructions

    def define(
        self,
        variable: str,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        name: str | None = None,
        origin: Provenance | None = None,
    ) -> None:
        """Add a call whose result becomes the value of `variable`. name: the node's name, if not the variable's."""
        node = self._named(name or variable, target, args, kwargs)
        self.env[variable] = node if origin is None else self._located(node, origin)

    def output(self, values: tuple[Any, ...]) -> None:
        """Add the node that returns `values` from the graph."""
        results = self.value(values)
        self.graph.output(results[0] if self.single else results)

    def call(self, item: Call) -> None:
        """Add the node of a call, and the nodes that select its results."""
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
                node = self.call_function(operator.getitem, node, at)
            self.env[variable] = node

    # --- kernels

    def launch(self, item: Launch) -> None:
        """Add the nodes that launch a kernel."""
        tensors = [self.variable(variable) for variable in item.variables]
        sizes = [self.sizes[symbol] for symbol in item.kernel.sizes]
        if isinstance(item.kernel.launch, TritonLaunch):
            self._launch_triton(item, tensors, sizes)
            return
        kernel_op.register(item.kernel.name, self.launchers[item.kernel.name])
        run = torch.ops.overlapc.run_kernel.default
        self._located(self.call_function(run, item.kernel.name, tensors, sizes), item.op.origin)

    def _launch_triton(self, item: Launch, tensors: list[Node], sizes: list[Any]) -> None:
        """Add one node per stage, after the nodes that allocate scratch memory for the stages."""
        import triton.language as tl
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation

        launch: TritonLaunch = item.kernel.launch
        launcher: Any = self.launchers[item.kernel.name]
        device = item.op.device
        views = [  # Triton specializes a kernel by the dtypes of its tensors
            tensor
            if self.program.layouts[variable].dtype is ELEMENT[pointer]
            else self.call_function(torch.ops.aten.view.dtype, tensor, ELEMENT[pointer])
            for variable, tensor, pointer in zip(item.variables, tensors, launch.pointers, strict=True)
        ]
        scratch = [
            self.call_function(torch.empty, self.size(count), dtype=dtype, device=device)
            for dtype, count in launch.scratch
        ]
        width = {} if launch.index_bounds is None else {"INDEX": tl.int64}  # the largest index may exceed 32 bits
        for function, stage in zip(launcher.functions, launch.stages, strict=True):
            given = dict(zip(function.arg_names, (*views, *scratch, *sizes), strict=False))
            node = self.call_function(
                triton_kernel_wrapper_mutation,
                kernel_idx=kernel_side_table.add_kernel(function),
                constant_args_idx=kernel_side_table.add_constant_args({**width, **stage_options(item.kernel, stage)}),
                grid=[(self.size(stage.programs), 1, 1)],
                tma_descriptor_metadata={},
                kwargs=given,
            )
            self._located(node, item.op.origin)

    # --- values

    def value(self, value: Any) -> Any:
        """Convert an argument or result: tensors and symbolic sizes become nodes, Python values stay as they are."""

        def leaf(item: Any) -> Any:
            if isinstance(item, View):
                return self._view(item)
            if isinstance(item, Handle):
                return self.variable(item.buffer)
            if isinstance(item, sympy.Expr):
                return self.size(item)
            return item if isinstance(item, _PLAIN) else self._attribute(type(item).__name__, item)

        return map_aggregate(value, leaf)

    def variable(self, name: str) -> Node:
        """Return the node of a variable, or of a constant."""
        if name not in self.env:
            self.env[name] = self._attribute(name, self.program.constants[name])
        return self.env[name]

    def _view(self, view: View) -> Node:
        variable = self.program.variables[view.buffer]
        own = self.program.layouts[variable]
        node = self.variable(variable)
        if isinstance(view, Returned):
            node = self._view(View(view.buffer, view.layout))
            node = self.call_function(torch.conj, node) if view.conjugated else node
            return self.call_function(torch._neg_view, node) if view.negated else node
        if view.dtype != own.dtype:
            node = self.call_function(support.as_dtype, node, view.dtype)
        elif (own.size, own.stride) == (view.layout.size, view.layout.stride) and view.layout.offset == 0:
            return node
        return self.call_function(support.strided, node, *self.shape(view.layout), self.size(view.layout.offset))

    def _attribute(self, hint: str, value: Any) -> Node:
        name = self.attribute_of.setdefault(id(value), f"{hint}_{len(self.attributes)}")
        self.attributes[name] = value
        return self.graph.get_attr(name)

    def shape(self, layout: Layout) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return (size, stride) of a layout, as numbers or nodes."""
        size = tuple(self.size(extent) for extent in layout.size)
        return size, tuple(self.size(step) for step in layout.stride)

    def size(self, expr: sympy.Expr) -> Any:
        """Return a size as a number, or as the node that computes it; equal sizes share one node."""
        if expr.is_Integer:
            return int(expr)
        if expr not in self.computed:
            known = {
                symbol: Proxy(node, self.tracer) if isinstance(node, Node) else node
                for symbol, node in ((symbol, self.sizes[symbol]) for symbol in expr.free_symbols)
            }
            result = sympy_interp(_SizeArithmetic, known, expr)
            self.computed[expr] = result.node if isinstance(result, Proxy) else result
        return self.computed[expr]

    # --- nodes

    def call_function(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Add a call whose node FX names itself."""
        return self.graph.call_function(target, args, kwargs)

    def _named(
        self, name: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Node:
        return self.graph.create_node("call_function", target, args, kwargs or {}, name=name)

    def _located(self, node: Node, origin: Provenance) -> Node:
        """Set the node's stack trace to its origin, in the format that FX graph printers expect."""
        if origin.source:
            path, _, rest = origin.source.partition(":")
            line, _, code = rest.partition(": ")
            node.stack_trace = f'  File "{path}", line {line}, in {origin.module or "forward"}\n    {code}'
        node.meta["overlapc_origin"] = origin.fx
        return node
