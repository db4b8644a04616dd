"""The interface that lowering rules use to build ops: names, sizes, layouts, kernels and calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._higher_order_ops.effects import with_effects
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import _disable_current_modes

from overlapc.fx.precision import is_coarse
from overlapc.fx.versions.graphs import binds_sizes
from overlapc.fx.versions.tensors import symbol_hint
from overlapc.ir.body import Body, Constant, Index, Load, Loop, Store, Value
from overlapc.ir.conversions import cast, is_number, number, without_trivial_reductions
from overlapc.ir.indexing import is_one, is_plain, loop_symbol
from overlapc.ir.ops import (
    Extern,
    Handle,
    IROp,
    Layout,
    Loops,
    LoweredGraph,
    View,
    tree_map,
    views_in,
)
from overlapc.ir.rewriting import canonical
from overlapc.lowering.computed_sizes import ComputedSizes
from overlapc.lowering.precision import coarsened
from overlapc.lowering.provenance import provenance
from overlapc.lowering.schema import (
    bound_symbol,
    has_side_effects,
    mutated,
    returned_argument,
    users_through_views,
)
from overlapc.lowering.table import OUT_VARIANTS, Impossible
from overlapc.lowering.target import Target
from overlapc.runtime.collective_ops import wait_for

aten = torch.ops.aten


class Lowering:
    """State of one graph's lowering, and the methods with which lowering rules build ops."""

    def __init__(self, name: str, target: Target) -> None:
        self.target = target
        self.env: dict[Node, Any] = {}
        self.latest: dict[str, str] = {}  # root buffer -> its name after the latest mutation
        self.original_inputs: dict[str, View] = {}  # copy of an input -> the input
        self.mutated: dict[str, str] = {}  # name after a mutation -> root buffer
        self.numbers: dict[str, Constant] = {}  # buffer -> its number, for CPU tensors such as `torch.tensor(0.5)`
        self.functions: dict[tuple[Any, ...], LoweredGraph] = {}  # lowered functions of attentions, shared by layers
        self.from_floats: dict[sympy.Expr, sympy.Symbol] = {}  # integer that is computed from floats -> its symbol
        self.known: set[str] = set()  # symbols that arguments or earlier ops define
        self.graph = LoweredGraph(name, (), {}, {}, {}, {}, {}, [], (), {})
        self.computed_sizes = ComputedSizes(self.graph)
        self.nodes: frozenset[str] = frozenset()  # names of all nodes in the FX graph
        self.node: Node
        self.item: int | None = None  # index of the tensor of a list op that is being lowered

    # --- names, sizes and layouts

    def value_of(self) -> Any:
        """Return the fake value of the current node, or of its current item."""
        value = self.node.meta["val"]
        return value if self.item is None else value[self.item]

    @contextmanager
    def for_item(self, item: int) -> Iterator[None]:
        """Lower one result of a list op in this context: names and layouts are that item's."""
        self.item = item
        try:
            yield
        finally:
            self.item = None

    def name_for(self, part: int | str | None = None) -> str:
        """Return a name for a result of the current node, or for a part of it."""
        return self._unlike_nodes(*(part for part in (self.item, part) if part is not None))

    def _unlike_nodes(self, *parts: Any) -> str:
        """Join the node's name and `parts` to a name that no node has, and no part of another node gets: FX names a
        second `topk` node `topk_1`, whose part 0 is `topk_1_0`, and part 0 of part 1 of `topk` is `topk_1__0`."""
        name = "_".join((self.node.name, "__".join(map(str, parts)))) if parts else self.node.name
        while parts and name in self.nodes:
            name += "_"
        return name

    def expr(self, size: Any) -> sympy.Expr:
        """Return a size as sympy; record the values of its symbols during tracing as hints."""
        if isinstance(size, torch.SymInt | torch.SymFloat):
            expr = size.node.expr
            for symbol in expr.free_symbols:
                if str(symbol) not in self.graph.size_hints:
                    hint = symbol_hint(size, symbol)
                    if hint is not None:
                        self.graph.size_hints[str(symbol)] = hint
            return expr.xreplace(self.from_floats) if self.from_floats else expr
        if isinstance(size, sympy.Expr):
            return size
        return sympy.Integer(int(size))

    def number_of_node(self, value: Any) -> sympy.Expr:
        """Return the current node's value, a number, as sympy: as a symbol of its own if it is an integer computed from
        floats, such as `TruncToInt(10*zuf0)`, so that sizes contain integers only."""
        expr = self.expr(value)
        if all(symbol.is_integer for symbol in expr.free_symbols):
            return expr
        return self.from_floats.setdefault(expr, sympy.Symbol(f"size_{self.node.name}", integer=True))

    def extent(self, size: Any) -> sympy.Expr:
        """Return a size as sympy; 1 if tracing has proved or guarded that an expression such as `s0 // 4` is 1.

        Tracing has broadcast such a dim, so the same element must be read for all positions.
        """
        expr = self.expr(size)
        is_longer = isinstance(size, torch.SymInt) and not expr.is_Symbol
        return sympy.S.One if is_longer and statically_known_true(size == 1) else expr

    def layout(self, tensor: torch.Tensor, offset: sympy.Expr | None = None) -> Layout:
        """Return the layout of a fake tensor. offset: replaces the tensor's own."""
        size = tuple(self.extent(size) for size in tensor.shape)
        self.computed_sizes.learn(size)
        return Layout(
            tensor.device,
            tensor.dtype,
            size,
            tuple(self.expr(step) for step in tensor.stride()),
            self.expr(tensor.storage_offset()) if offset is None else offset,
        )

    def current(self, value: Any) -> Any:
        """Rename the buffers of all views in `value`, a tree, to their names after all mutations so far."""
        if not self.latest:
            return value

        def rename(leaf: Any) -> Any:
            if isinstance(leaf, View):
                root = self.graph.root(leaf.buffer)
                if root in self.latest:
                    return View(self.latest[root], leaf.layout)
            return leaf

        return tree_map(rename, value)

    # --- kernels

    def add(self, op: IROp) -> None:
        """Append an op to the graph; record its views, and the buffers from which new sizes come."""
        for output in op.outputs:
            if isinstance(output, View):
                self.graph.views[output.buffer] = output
                sizes = (*output.layout.size, *output.layout.stride)
            else:
                sizes = (output.defines,) if output.defines is not None else ()
            for size in sizes:
                if size.is_Symbol and str(size) not in self.known:
                    self.known.add(str(size))
                    self.graph.sources[str(size)] = output.buffer
        self.graph.ops.append(op)

    def loops(
        self,
        body: Callable[[View], Body],
        layout: Layout | None = None,
        name: str | None = None,
    ) -> View:
        """Add a kernel with one output, whose layout is that of the fake tensor unless `layout` is given.

        Raises Impossible if that layout has holes or overlaps (a kernel must define every element).
        """
        layout = layout or self.layout(self.value_of(), offset=sympy.S.Zero)
        view = View(name or self.name_for(), layout)
        if any(extent == 0 for extent in layout.size):
            return self._empty(view)
        if not layout.is_dense():
            raise Impossible(f"output strides {layout.stride} of size {layout.size} leave holes")
        made = self._made(without_trivial_reductions(body(view)), layout.device)
        self.add(Loops(view.buffer, layout.device, made, (view,), origin=provenance(self.node)))
        return view

    def pointwise(
        self,
        function: Callable[..., Value],
        *args: Any,
        name: str | None = None,
        layout: Layout | None = None,
    ) -> View:
        """Add a kernel that computes each output element as `function` of the arguments' elements, with broadcasting.

        Arguments are views, numbers or sizes; `function` gets a Value for each, in its memory dtype.
        """

        def body(out: View) -> Body:
            loops, position = self.loops_over(out.layout)
            value = function(*(self.element(arg, position) for arg in args))
            return Body(loops, (), (self.store(out, position, value),))

        return self.loops(body, layout, name)

    def update(self, target: View, body: Callable[[View], Body]) -> View:
        """Add a kernel that changes elements of `target` in place; return `target` under its name after the change.

        `body` must store to the view that it is called with.
        """
        root = self.graph.root(target.buffer)
        after = self._mutated_name(root)
        renamed = View(after.buffer, target.layout)
        made = self._made(body(renamed), target.layout.device)
        if any(loop.size == 0 for loop in (*made.loops, *made.reduction)):
            return target
        before = self.latest.get(root, root)
        origin = provenance(self.node)
        self.add(Loops(after.buffer, target.layout.device, made, (), (after,), (before,), origin))
        self.rename(after)
        return renamed

    def _made(self, body: Body, device: torch.device) -> Body:
        """Return `body` in canonical form, with the operations marked that need not be exact.

        Raises Impossible if the device's generator accepts neither it nor its index expressions.
        """
        body = canonical(self.computed_sizes.in_symbols(coarsened(body, is_coarse(self.node))))
        for expr in body.expressions():
            if not is_plain(expr):
                raise Impossible(f"the index or size {expr}")
        reason = self.target.refuse(device, body)
        if reason is not None:
            raise Impossible(reason)
        return body

    def replaces_its_input(self, x: View) -> bool:
        """Whether the node's result may be written into the memory of its first argument, `x`.

        That requires that `x` is an input into which the graph copies this very result at its end, that nothing reads
        the old content from here on (including this node's other arguments), and that the result is not returned.
        """
        given = self.node.args[0] if self.node.args else None
        if not isinstance(given, Node) or given.op != "placeholder" or self.graph.views.get(given.name) != x:
            return False
        copies = [
            user for user in given.users if user.target is aten.copy_.default and user.args[:2] == (given, self.node)
        ]
        if len(copies) != 1 or self.layout(self.value_of()) != x.layout or not x.layout.is_dense():
            return False
        others = [node for node in self.node.all_input_nodes if node is not given]
        if self.node.all_input_nodes.count(given) != 1 or any(
            self.graph.root(view.buffer) == x.buffer for node in others for view in views_in(self.env[node])
        ):
            return False
        later = [user for user in users_through_views(given) if user not in self.env and user is not self.node]
        returned = any(user.op == "output" for user in users_through_views(self.node))
        return later == copies and not returned

    def _empty(self, view: View) -> View:
        """Allocate a tensor without elements by a call, so that no later stage has to handle kernels without work."""
        layout = view.layout
        options = {"dtype": layout.dtype, "device": layout.device}
        call = torch.empty_strided
        self.add(Extern(view.buffer, call, (layout.size, layout.stride), options, view, origin=provenance(self.node)))
        return view

    # --- loops and elements of kernels

    def loops_over(self, layout: Layout) -> tuple[tuple[Loop, ...], tuple[sympy.Expr, ...]]:
        """Return loops over every position of `layout`, outermost in memory first, and the position by dim."""
        position: list[sympy.Expr] = [sympy.S.Zero] * len(layout.size)
        loops: list[Loop] = []
        for dim in layout.dim_order():
            symbol = loop_symbol("p", len(loops))
            position[dim] = symbol
            loops.append(Loop(symbol, layout.size[dim]))
        return tuple(loops), tuple(position)

    def element(self, arg: Any, position: Sequence[sympy.Expr]) -> Value:
        """Return the element of `arg` at `position` of the tensor that it is broadcast to."""
        known = self.number_of(arg)
        if known is not None:
            return known
        if isinstance(arg, View):
            skip = len(position) - len(arg.size)
            at = tuple(sympy.S.Zero if is_one(extent) else position[skip + dim] for dim, extent in enumerate(arg.size))
            return Load(arg.buffer, arg.layout.at(at), arg.dtype)
        return self.scalar(arg)

    def number_of(self, arg: Any) -> Constant | None:
        """Return the number if `arg` is a 0-dim CPU tensor such as `torch.tensor(0.5)`, else None.

        Eager's kernels on other devices read such a tensor as a number; it differs only in dtype promotion.
        """
        return self.numbers.get(arg.buffer) if isinstance(arg, View) else None

    def scalar(self, arg: Any) -> Value:
        """Return a number or size as a value, in the widest dtype of its Python type."""
        if isinstance(arg, bool):
            return Constant(arg, torch.bool)
        if isinstance(arg, int):
            return Constant(arg, torch.int64)
        if isinstance(arg, float):
            return Constant(arg, torch.float64)
        if isinstance(arg, sympy.Expr):
            if arg.is_Integer:
                return Constant(int(arg), torch.int64)
            if not is_number(arg):
                raise Impossible(f"{arg} in a kernel")
            return Index(arg) if arg.is_integer else number(arg)
        raise Impossible(f"a {type(arg).__name__} argument")

    def check_held(self, dtype: torch.dtype, *numbers: Any) -> None:
        """Raise Impossible if an integer `dtype` cannot hold a number: the op is called then, which raises an error."""
        for each in numbers:
            if isinstance(each, int | float) and not (dtype.is_floating_point or _holds(dtype, each)):
                raise Impossible(f"{each} as {dtype}")

    def store(self, out: View, position: Sequence[sympy.Expr], value: Value) -> Store:
        """Return the store of `value` to a position of `out`, rounded to the dtype of `out`."""
        index = out.layout.at(tuple(position))
        return Store(out.buffer, index, cast(value, out.dtype), out.dtype, wide=not self.target.rounds)

    def promoted(self, kind: PROMOTION, *args: Any) -> torch.dtype:
        """Return the dtype in which torch computes an element-wise op on these arguments (float32 if low precision)."""
        return elementwise_dtypes(*(_promotable(arg) for arg in args), type_promotion_kind=kind)[0]

    def common_dtype(self, *args: Any) -> torch.dtype:
        """Return the dtype to which torch promotes these arguments, including low precision."""
        return elementwise_dtypes(*(_promotable(arg) for arg in args), type_promotion_kind=PROMOTION.DEFAULT)[1]

    # --- calls

    def extern(
        self,
        target: Callable[..., Any],
        args: Any,
        kwargs: Mapping[str, Any],
        fallback: bool = False,
        pure: bool | None = None,
    ) -> Any:
        """Add a call of `target` and return its results, whose layouts are those of the fake tensors.

        pure: whether it may be dropped if its results are not read; by default its schema decides.
        """
        call = self.call_of(target, args, kwargs, fallback)
        if pure is not None:
            call = dataclasses.replace(call, pure=pure)
        self.add(call)
        for view in call.mutates:
            self.rename(view)
        return self.results_of(call)

    def call_of(self, target: Any, args: Any, kwargs: Mapping[str, Any], fallback: bool) -> Extern:
        """Return the node as a call of `target`: results like the fake ones, mutated arguments under new names."""
        roots = dict.fromkeys(self.graph.root(view.buffer) for view in mutated(target, args, kwargs))

        def mirror(value: Any, path: tuple[int, ...]) -> Any:
            if isinstance(value, tuple | list):
                parts = [mirror(item, (*path, at)) for at, item in enumerate(value)]
                return tuple(parts) if isinstance(value, tuple) else parts
            if value is None:
                return None
            returned = returned_argument(target, path[0] if path else 0, args, kwargs)
            if returned is not None:
                return returned
            name = self._unlike_nodes(*path)
            if target is with_effects and path == (0,):
                return Handle(name)
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                return View(name, self.layout(value, offset=sympy.S.Zero))
            return self._number(name, value, path)

        result = mirror(self.node.meta.get("val"), ())
        out = isinstance(result, View) and target in OUT_VARIANTS and result.layout.is_dense()
        return Extern(
            self.node.name,
            target,
            tuple(args),
            dict(kwargs),
            result,
            tuple(self._mutated_name(root) for root in roots),
            out,
            fallback,
            pure=not roots and not has_side_effects(target),
            origin=provenance(self.node),
        )

    def _number(self, name: str, value: Any, path: tuple[int, ...]) -> Handle:
        """Return result `path` of the node, which is no strided tensor."""
        if isinstance(value, torch.SymBool) and binds_sizes(self.node):
            flags = value.node.expr.free_symbols  # of `Eq(u0, 1)`; none if a check promises which it is
            return Handle(name, flag=next(iter(flags), None))
        if not isinstance(value, torch.SymInt):
            return Handle(name)
        expr = self.expr(value)
        own = bound_symbol(self.node, path)
        if own is not None and (not expr.is_Symbol or str(expr) in self.known):
            # A check promises that the number equals `expr`, so that tracing writes `expr` for it. The check itself
            # must see the number.
            return Handle(name, own)
        return Handle(name, expr)

    def _mutated_name(self, root: str) -> View:
        base = name = f"{root}__{self.node.name}"
        times = 1
        while name in self.graph.aliases:  # a node may change one buffer several times
            times += 1
            name = f"{base}_{times}"
        renamed = View(name, self.graph.views[root].layout)
        self.mutated[renamed.buffer] = root
        return renamed

    def rename(self, view: View) -> None:
        """Make `view` the latest name of the contents of its memory."""
        root = self.mutated[view.buffer]
        self.graph.aliases[view.buffer] = self.latest.get(root, root)
        self.graph.views[view.buffer] = view
        self.latest[root] = view.buffer

    def wait_for(self, tensors: Any, arguments: Any = ()) -> None:
        """Wait for all tensors in a structure: an op that was called may have left their communication in flight.

        A wait counts as a change of its tensor, so that all readers come after it. The tensors among the `arguments`
        of the op live until then, because the communication may still read them.
        """
        origin, held = provenance(self.node), views_in(self.current(arguments))
        for view in views_in(self.current(tensors)):
            after = self._mutated_name(self.graph.root(view.buffer))
            name, args = f"wait_{after.buffer}", (view, *held)
            self.add(Extern(name, wait_for, args, {}, None, (after,), pure=False, origin=origin))
            self.rename(after)

    def results_of(self, call: Extern) -> Any:
        """Return the results of a call as its readers see them: views, and numbers as expressions."""

        def leaf(value: Any) -> Any:
            return value.expr if isinstance(value, Handle) and value.expr is not None else value

        return self.current(tree_map(leaf, call.result))


def _promotable(arg: Any) -> Any:
    """Return a value that torch's promotion rules treat like `arg`: a tensor of its dtype and rank, or a number."""
    if isinstance(arg, View):
        return _tensor_of(len(arg.size), arg.dtype)
    if isinstance(arg, sympy.Expr):
        return 1 if arg.is_integer else 1.0
    return arg


@lru_cache(10_000)
def _holds(dtype: torch.dtype, number: float) -> bool:
    with _disable_current_modes():
        try:
            torch.full((), number, dtype=dtype)
        except RuntimeError:
            return False
    return True


@lru_cache(None)
def _tensor_of(dims: int, dtype: torch.dtype) -> Tensor:
    with _disable_current_modes():  # fake tensors take a hundred times as long to create
        return torch.empty([1] * dims, dtype=dtype, device="meta")
