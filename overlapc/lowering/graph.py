"""Lowers an FX graph to loop IR: visits the nodes once, and looks up each op's lowering in the table.

An op that has no lowering, or for which no kernel can be generated (complex numbers, another device, a layout with
holes), becomes a call of that op, so that lowering never fails because of an op.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils._sympy.functions import ToFloat

from overlapc.errors import CompileError, OverlapcError
from overlapc.fx.comm.communication import is_wait
from overlapc.fx.control import done, order_of
from overlapc.fx.precision import note_coarse_once
from overlapc.fx.subgraphs import carries_graphs
from overlapc.fx.versions.graphs import binds_sizes
from overlapc.ir.conversions import is_number
from overlapc.ir.ops import (
    Extern,
    Handle,
    IROp,
    Layout,
    LoweredGraph,
    Returned,
    Start,
    View,
    Wait,
    buffers_written,
    named_in,
    views_in,
)
from overlapc.lowering.context import Lowering
from overlapc.lowering.provenance import provenance
from overlapc.lowering.schema import is_effect_token, is_view, users_through_views
from overlapc.lowering.table import LIBRARY_CALLS, Impossible, lowering_of
from overlapc.lowering.target import ANY_KERNEL, Target
from overlapc.runtime.support import offset_of, owned

aten = torch.ops.aten
GENERATED_DTYPES = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16,
     torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2)
)  # fmt: skip
# Ops not tagged pointwise whose lowerings also make a number in a CPU tensor a constant of the kernel.
READS_NUMBERS = frozenset((aten._to_copy.default, aten.masked_fill.Tensor))
_DIVISIONS = frozenset((operator.truediv, operator.floordiv, operator.mod))


@dataclasses.dataclass(frozen=True, slots=True)
class Communication:
    """The communication of a node, and whether it is followed by a separate wait."""

    comm: Any  # overlapc.schedule.model.Comm
    asynchronous: bool


def lower(
    gm: GraphModule,
    name: str,
    comm_of: Callable[[Node], Communication | None] = lambda node: None,
    target: Target = ANY_KERNEL,
    stand_ins: Mapping[Node, Node] = MappingProxyType({}),
) -> LoweredGraph:
    """Lower `gm`, an AOTAutograd graph whose nodes carry fake tensors in `meta["val"]`.

    comm_of: the communication of a node, or None. target: which kernels can be generated.
    stand_ins: nodes that are not lowered -> an earlier node, which their readers read instead; the lowered graph does
    not return them either (planning/repeated_layers.py adds them later).
    CompileError, with the FX node and the user's line, if a node cannot be lowered at all.
    """
    note_coarse_once(gm.graph)
    lowering = GraphLowering(Lowering(name, target), gm, comm_of, stand_ins)
    for node in gm.graph.nodes:
        try:
            lowering.run(node)
        except OverlapcError:
            raise
        except (AssertionError, KeyError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
            place = provenance(node)
            raise CompileError(
                f"cannot lower {node.name} = {node.target}: {type(error).__name__}: {error}\n"
                f"   at {place.source or 'unknown line'}\n"
                'hint: options={"native": False} calls the library op of every node; please report this graph'
            ) from error
    return lowering.graph


class GraphLowering:
    """Lowers the nodes of one graph in order; the context holds their results."""

    def __init__(
        self,
        context: Lowering,
        gm: GraphModule,
        comm_of: Callable[[Node], Communication | None],
        stand_ins: Mapping[Node, Node],
    ) -> None:
        self.context = context
        context.nodes = frozenset(node.name for node in gm.graph.nodes)
        self.graph = context.graph
        self.gm = gm
        self.comm_of = comm_of
        self.stand_ins = stand_ins
        self.writer_of: dict[str, str] = {}  # buffer -> the op that wrote it
        self.in_flight: set[str] = set()  # results of collectives that may be in flight
        self.copied_views: set[str] = set()  # copies of a view's elements, without the rest of the view's memory
        # Returned `as_strided` that the graph reads from a copy -> arguments of its call.
        self.returned_strided: dict[Node, tuple[Any, Any]] = {}
        self.strided_from: dict[str, View] = {}  # copy made by `as_strided` -> the input's view that it strided over
        self.divisors: set[sympy.Expr] = set()  # all divisors of sizes so far

    def run(self, node: Node) -> None:
        """Lower one node; all nodes that it reads must be lowered already."""
        if node in self.stand_ins:
            self.context.env[node] = self.context.env[self.stand_ins[node]]
            return
        self.context.node = node
        count = len(self.graph.ops)
        if node.op == "placeholder":
            self.context.env[node] = self._input(node)
        elif node.op == "get_attr":
            self.context.env[node] = self._constant(node)
        elif node.op == "output":
            results: Any = node.args[0]
            self.graph.outputs = tuple(self._returned(each for each in results if each not in self.stand_ins))
        else:
            assert node.op == "call_function", f"unexpected FX node kind {node.op}"
            self.context.env[node] = self._call(node)
        self._order(node, self.graph.ops[count:])

    def _returned(self, results: Any) -> Iterator[Any]:
        """Yield the graph's results. Different nodes yield different tensors, as in eager, even if views are equal.

        Autograd distinguishes tensors by object: a tensor's gradient must not reach its detached alias.
        """
        first: dict[View, Node] = {}
        for result in results:
            leaf = self._in_input(result) or self.context.current(self._resolve(result))
            if isinstance(leaf, View) and leaf.buffer in self.copied_views:
                leaf = self._in_its_memory(result) or leaf
            if isinstance(result, Node) and isinstance(leaf, View) and first.setdefault(leaf, result) is not result:
                leaf = Returned(leaf.buffer, leaf.layout, result.name)
            yield leaf

    def _in_input(self, result: Any) -> View | None:
        """Return a returned `as_strided` in the memory of its input, where the graph itself reads a copy; else None."""
        if not isinstance(result, Node) or result not in self.returned_strided:
            return None
        name = f"{result.name}_returned"
        if name not in self.graph.views:
            args, kwargs = self.returned_strided[result]
            view = View(name, self.context.layout(result.meta["val"], offset=sympy.S.Zero))
            self.context.add(Extern(name, aten.as_strided.default, args, kwargs, view, origin=provenance(result)))
        return self.graph.views[name]

    def _in_its_memory(self, result: Node) -> View | None:
        """Return a view that kernels read from a copy in the memory that it has in eager; None if that is unknown.

        What lies in an input is viewed by AOTAutograd.
        """
        source = result
        while is_view(source) and source.target is not aten.as_strided.default and not binds_sizes(source):
            source = source.all_input_nodes[0]
        base = self.context.current(self._resolve(source))
        if not isinstance(base, View) or base.buffer in self.copied_views or self._is_callers(base):
            return None
        value, origin = result.meta["val"], source.meta["val"]
        layout = self.context.layout(value)
        shift = base.layout.offset - self.context.expr(origin.storage_offset())
        offset = layout.offset + shift * base.dtype.itemsize / value.dtype.itemsize
        if not offset.is_integer:
            return None
        bits = value.is_conj() != origin.is_conj(), value.is_neg() != origin.is_neg()
        layout = dataclasses.replace(layout, offset=offset)
        return Returned(base.buffer, layout, result.name, *bits) if any(bits) else View(base.buffer, layout)

    def _is_callers(self, base: View) -> bool:
        root = self.graph.root(base.buffer)
        return root in self.graph.inputs or root in self.graph.constants

    def _order(self, node: Node, made: Sequence[IROp]) -> None:
        """Record the op that writes each buffer, and the ops after which the ops in `made` must run."""
        self.writer_of.update((name, op.name) for op in made for name in buffers_written(op))
        mark = order_of(node)
        if mark is not None:
            earlier = dict.fromkeys(self.writer_of.get(leaf.buffer) for leaf in named_in(self._resolve(mark.args)))
            names = tuple(name for name in earlier if name is not None)
            self.graph.order.update({op.name: names for op in made if names})

    def _input(self, node: Node) -> Any:
        self.graph.inputs += (node.name,)
        value = node.meta.get("val")
        if is_effect_token(node):
            return Handle(node.name)
        if isinstance(value, torch.Tensor):
            # Kernels receive a tensor's data pointer, which already includes the input's own storage offset.
            layout = self.context.layout(value, offset=sympy.S.Zero)
            self.graph.views[node.name] = View(node.name, layout)
            self.context.known.update(
                str(symbol) for size in (*layout.size, *layout.stride) for symbol in size.free_symbols
            )
            if value.is_neg() or value.is_conj():
                return self._resolved(self.graph.views[node.name])
            return self.graph.views[node.name]
        if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
            self.graph.scalars[node.name] = self.context.number_of_node(value)
            self.context.known.update(str(symbol) for symbol in self.graph.scalars[node.name].free_symbols)
            return self.graph.scalars[node.name]
        return Handle(node.name)

    def _resolved(self, given: View) -> View:
        """Copy an input with its conjugate or negative bit resolved in memory."""
        name = f"{self.context.node.name}_resolved"
        view = View(name, given.layout)
        self.context.add(
            Extern(name, owned(aten.alias.default), (given,), {}, view, origin=provenance(self.context.node))
        )
        self.context.original_inputs[name] = given
        return view

    def _constant(self, node: Node) -> Any:
        target: Any = self.gm
        for part in str(node.target).split("."):
            target = getattr(target, part)
        name = f"constant_{node.name}"
        self.graph.constants[name] = target
        if isinstance(target, torch.Tensor):
            value = node.meta.get("val", target)
            self.graph.views[name] = View(name, self.context.layout(value, offset=sympy.S.Zero))
            return self.graph.views[name]
        return Handle(name)

    def _call(self, node: Node) -> Any:
        args, kwargs = self._resolve(node.args), self._resolve(node.kwargs)
        if (
            node.target is aten.copy_.default
            and isinstance(args[0], View)
            and args[0].buffer in self.context.original_inputs
        ):
            args = (self.context.original_inputs[args[0].buffer], *args[1:])  # the caller's tensor, not our copy of it
        value = node.meta.get("val")
        target = node.target
        if target is done:
            return None
        assert callable(target), f"the target of a call is {target!r}"
        if target is operator.getitem and not isinstance(args[0], View | Handle):
            return args[0][args[1]]
        is_size = isinstance(value, torch.SymInt | int) and not isinstance(value, bool)
        if (is_size or (isinstance(value, torch.SymFloat) and is_number(value.node.expr))) and not binds_sizes(node):
            self._check_divisor(node, target, args)
            expr = self.context.number_of_node(value)
            if expr.is_Symbol and str(expr) not in self.context.known:  # the call defines it
                self.context.add(
                    Extern(node.name, target, args, kwargs, Handle(node.name, expr), origin=provenance(node))
                )
            return expr  # size arithmetic becomes an expression over symbols
        comm = self.comm_of(node)
        if comm is not None or is_wait(node):
            return self._communicate(node, args, kwargs, comm)
        if is_view(node) and isinstance(args[0], View):
            whole = self.strided_from.get(args[0].buffer) if target is aten.as_strided.default else None
            if whole is not None:
                args, kwargs = (whole, *args[1:3], self._offset_in_memory(node)), {}
            elif binds_sizes(node):
                self._bind_offset(node, target, args, kwargs)
            elif self._is_described(args[0], value) and not self._starts_at_callers_memory(node, args[0]):
                return self._view(node, args[0], value)
            if target is aten.as_strided.default and self._is_returned(node, args[0]):
                # The result shares the input's memory, as in eager. Reuse of that memory checks its references first.
                if all(user.op == "output" for user in node.users):
                    return self.context.extern(target, args, kwargs, pure=True)
                self.returned_strided[node] = args, kwargs
            # The result is copied if it shares memory, because memory reuse would not know of the alias.
            copied = self.context.extern(owned(target), args, kwargs, pure=True)
            if target is aten.as_strided.default:
                self.strided_from[copied.buffer] = args[0]
            self.copied_views.add(copied.buffer)
            return copied
        rule = lowering_of(target)
        if rule is not None and self._can_generate(target, value, args, kwargs):
            count = len(self.graph.ops)
            try:
                return rule(self.context, *args, **kwargs)
            except Impossible:
                del self.graph.ops[count:]
        return self.context.extern(
            target, args, kwargs, fallback=target not in LIBRARY_CALLS and not carries_graphs(node)
        )

    def _check_divisor(self, node: Node, target: Callable[..., Any], args: Any) -> None:
        """Add a call that divides sizes, which raises ZeroDivisionError as no kernel can, if their divisor may be 0."""
        divisor = args[1] if target in _DIVISIONS else None
        if not isinstance(divisor, sympy.Expr) or divisor in self.divisors:
            return
        self.divisors.add(divisor)
        if divisor.replace(ToFloat, lambda size: size).is_zero is not False:
            result = Handle(node.name)
            self.context.add(Extern(node.name, target, args, {}, result, pure=False, origin=provenance(node)))

    def _bind_offset(self, node: Node, target: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Add a call that returns the offset of a view, if only the op knows it.

        torch 2.11 traces a slice of rows that data choose with a new size and a new offset. Such a view is copied: its
        size is that of the copy, but the copy's own offset is 0.
        """
        offset = self.context.expr(node.meta["val"].storage_offset())
        if offset.is_Symbol and str(offset) not in self.context.known:
            name = f"{node.name}_offset"
            result = Handle(name, offset)
            self.context.add(Extern(name, offset_of(target), tuple(args), kwargs, result, origin=provenance(node)))

    def _communicate(self, node: Node, args: Any, kwargs: Any, comm: Any) -> Any:
        if is_wait(node):
            source = args[0]
            if not isinstance(source, View):
                return source
            if source.buffer not in self.in_flight:
                self.context.wait_for(source)
                return self.context.current(source)
            result = View(node.name, source.layout)
            self.graph.aliases[result.buffer] = source.buffer
            # A wait covers its whole start, but each of the start's results has a wait of its own.
            self.context.add(Wait(node.name, source, result, provenance(node)))
            return result
        call = self.context.call_of(node.target, args, kwargs, fallback=False)
        if not comm.asynchronous:
            self.context.add(dataclasses.replace(call, comm=comm.comm, pure=False))
            for view in call.mutates:
                self.context.rename(view)
            if not comm.comm.safe:
                self.context.wait_for((call.result, call.mutates), call.arguments)
            return self.context.results_of(call)
        self.context.add(Start(node.name, call, comm.comm, provenance(node)))
        for view in call.mutates:
            self.context.rename(view)
        self.in_flight.update(result.buffer for result in call.outputs)
        return self.context.results_of(call)

    def _resolve(self, tree: Any) -> Any:
        def leaf(value: Any) -> Any:
            return self.context.current(self.context.env[value]) if isinstance(value, Node) else value

        return torch.fx.node.map_aggregate(tree, leaf)

    def _can_generate(self, target: Any, value: Any, args: Any, kwargs: Any) -> bool:
        outputs = [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        views = views_in((args, kwargs))
        if target in READS_NUMBERS or torch.Tag.pointwise in getattr(target, "tags", ()):
            views = [view for view in views if self.context.number_of(view) is None]
        devices = {*(tensor.device for tensor in outputs), *(view.layout.device for view in views)}
        if len(devices) != 1 or not self.context.target.generates(next(iter(devices))):
            return False
        handles = [leaf for leaf in named_in((args, kwargs)) if isinstance(leaf, Handle)]
        if not all(isinstance(self.graph.constants.get(handle.buffer), GraphModule) for handle in handles):
            return False  # a number known only at run time, or a tensor that is not strided
        if any(tensor.layout != torch.strided for tensor in outputs):
            return False
        return {*(tensor.dtype for tensor in outputs), *(view.dtype for view in views)} <= GENERATED_DTYPES

    def _view(self, node: Node, base: View, value: Any) -> Any:
        """Return the result of a view op as layouts over the buffer of `base`."""
        origin = self._argument_value(node)
        shift = base.layout.offset - self.context.expr(origin.storage_offset())

        def leaf(tensor: Any) -> Any:
            assert isinstance(tensor, torch.Tensor), f"view op returned {type(tensor).__name__}"
            layout = self.context.layout(tensor)
            layout = dataclasses.replace(layout, offset=layout.offset + shift)
            if base.buffer in self.copied_views and node.target is aten.as_strided.default:
                _check_within(node, layout, self.graph.views[base.buffer].layout)
            return View(base.buffer, layout)

        return torch.utils._pytree.tree_map(leaf, value)

    def _is_described(self, base: View, value: Any) -> bool:
        """Whether a view op's results are just layouts over the elements in the memory of `base`.

        Conjugate and negative bits were resolved when that memory was written, so a view that changes such a bit, or
        the dtype, has other elements.
        """
        origin = self._argument_value(self.context.node)
        return all(
            isinstance(leaf, torch.Tensor)
            and leaf.layout == torch.strided
            and leaf.dtype == base.dtype
            and leaf.is_conj() == origin.is_conj()
            and leaf.is_neg() == origin.is_neg()
            for leaf in torch.utils._pytree.tree_leaves(value)
        )

    def _starts_at_callers_memory(self, node: Node, base: View) -> bool:
        """Whether a view's offset is relative to the beginning of an input's storage.

        The storage offset of an input is not guarded, and that of a tangent may differ from tracing. Only the called op
        itself, which gets the tensor, knows it.
        """
        if node.target is not aten.as_strided.default or self.graph.root(base.buffer) not in self.graph.inputs:
            return False
        return _given_offset(node) is not None

    def _is_returned(self, node: Node, base: View) -> bool:
        """Whether a view of an input is returned, and the graph does not change that input."""
        if all(user.op != "output" for user in node.users) or not self._starts_at_callers_memory(node, base):
            return False
        source = next(x for x in self.gm.graph.find_nodes(op="placeholder") if x.name == self.graph.root(base.buffer))
        calls = [user.target for user in users_through_views(source) if user.op != "output"]
        return all(isinstance(op, torch._ops.OpOverload) and not op._schema.is_mutable for op in calls)

    def _offset_in_memory(self, node: Node) -> Any:
        """Return the storage offset of an `as_strided` of an `as_strided` result, in the same storage."""
        given = _given_offset(node)
        return self.context.expr(self._argument_value(node).storage_offset()) if given is None else self._resolve(given)

    def _argument_value(self, node: Node) -> torch.Tensor:
        first = node.args[0]
        assert isinstance(first, Node)
        value = first.meta.get("val")
        return value if isinstance(value, torch.Tensor) else getattr(self.gm, str(first.target))


def _check_within(node: Node, strided: Layout, copied: Layout) -> None:
    """Raise CompileError if `as_strided` reads elements outside of the view that was copied."""
    last = strided.offset + sum((size - 1) * step for size, step in zip(strided.size, strided.stride, strict=True))
    end = sum((size - 1) * step for size, step in zip(copied.size, copied.stride, strict=True))
    if not (strided.offset.is_nonnegative and (end - last).is_nonnegative):
        raise CompileError(
            f"{node.name}: as_strided reads past a view of another dtype or of conjugates, into the rest of its memory"
            f"\n   at {provenance(node).source or 'unknown line'}\nhint: call as_strided first, then view(dtype)"
        )


def _given_offset(node: Node) -> Any:
    """Return the `storage_offset` argument of an `as_strided`; None if it uses its tensor's offset."""
    return node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
