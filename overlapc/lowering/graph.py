"""FX graph -> loop IR: walks the nodes once and asks the table for each op.

What has no lowering, or cannot be generated here (complex numbers, another device, a layout with holes), becomes an
extern call of the very op, so a graph never fails because of an op.
"""

from __future__ import annotations

import dataclasses
import operator
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
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from overlapc.errors import CompileError, OverlapcError
from overlapc.fx.control import done, order_of
from overlapc.fx.subgraphs import carries_graphs
from overlapc.fx.versions import symbol_hint
from overlapc.ir.body import (
    Body,
    Constant,
    Index,
    Load,
    Loop,
    Store,
    Value,
    canonical,
)
from overlapc.ir.indexing import is_one, is_plain, loop_symbol
from overlapc.ir.ops import (
    Extern,
    Handle,
    IROp,
    Layout,
    Loops,
    LoweredGraph,
    Provenance,
    Refuse,
    Start,
    View,
    Wait,
    buffers_written,
    nothing_refused,
    tree_map,
)
from overlapc.ir.values import cast, is_number, number, without_trivial_reductions
from overlapc.lowering.table import LIBRARY_CALLS, OUT_VARIANTS, Impossible, lowering_of
from overlapc.runtime.support import owned

aten = torch.ops.aten
Scalar = int | float | bool | sympy.Expr
GENERATED_DTYPES = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16,
     torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2)
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Communication:
    """What a node that communicates moves, and whether somebody else waits for it."""

    comm: Any  # overlapc.schedule.model.Comm
    asynchronous: bool


def lower(
    gm: GraphModule,
    name: str,
    generates: Callable[[torch.device], bool],
    comm_of: Callable[[Node], Communication | None],
    native_product: Callable[[Any], bool] = lambda product: False,
    refuse: Refuse = nothing_refused,
) -> LoweredGraph:
    """The ops of `gm`, an AOTAutograd graph whose nodes carry fake tensors in `meta["val"]`.

    `generates` tells on which devices kernels can be generated; `comm_of` says which nodes communicate;
    `native_product` which matrix products (`product.Product`) are to be kernels of our own; an op whose kernel the
    device's generator would `refuse` is called as it stands.
    Raises CompileError naming the FX node and the user's line when a node cannot be lowered at all.
    """
    context = Context(gm, name, generates, comm_of, native_product, refuse)
    for node in gm.graph.nodes:
        try:
            context.run(node)
        except OverlapcError:
            raise
        except (AssertionError, KeyError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
            place = provenance(node)
            raise CompileError(
                f"cannot lower {node.name} = {node.target}: {type(error).__name__}: {error}\n"
                f"   at {place.source or 'unknown line'}\n"
                'hint: options={"native": False} runs every op as it stands; please report this graph'
            ) from error
    return context.finish()


def provenance(node: Node) -> Provenance:
    """Where `node` comes from: innermost user frame and module path, as Dynamo recorded them."""
    source = ""
    trace = node.meta.get("stack_trace") or ""
    frames = [line.strip() for line in trace.splitlines()]
    for at in range(len(frames) - 1, -1, -1):
        if frames[at].startswith("File "):
            _, path, rest = frames[at].split('"', 2) if frames[at].count('"') >= 2 else ("", "", frames[at])
            number = rest.split("line ", 1)[-1].split(",")[0]
            code = frames[at + 1] if at + 1 < len(frames) and not frames[at + 1].startswith("File ") else ""
            source = f"{path}:{number}: {code}"
            break
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module = next(reversed(stack.values()))[0] if stack else ""
    return Provenance((node.name,), source, clean_module(module))


def clean_module(path: str) -> str:
    """`L['self']._modules['layers']._modules['0']` or `L['self'].layers[0]` as `layers.0`."""
    for old, new in (
        ("L['self']", ""),
        ("._modules['", "."),
        ("']", ""),
        ("['", "."),
        ("[", "."),
        ("]", ""),
        ("L.", ""),
    ):
        path = path.replace(old, new)
    return path.strip(".").removeprefix("self.")


class Context:
    """State of one lowering; what lowering functions build ops with."""

    def __init__(
        self,
        gm: GraphModule,
        name: str,
        generates: Callable[[torch.device], bool],
        comm_of: Callable[[Node], Communication | None],
        native_product: Callable[[Any], bool],
        refuse: Refuse,
    ) -> None:
        self.gm = gm
        self.generates = generates
        self.comm_of = comm_of
        self.native_product = native_product
        self.refuse = refuse
        self.env: dict[Node, Any] = {}
        self.latest: dict[str, str] = {}  # root buffer -> its name after the latest mutation
        self.given: dict[str, View] = {}  # copy of an input -> the input
        self.mutated: dict[str, str] = {}  # name after a mutation -> root buffer
        self.made_by: dict[str, str] = {}  # buffer -> the op that wrote it
        self.flying: set[str] = set()  # results of collectives, until their wait
        self.known: set[str] = set()  # symbols that the arguments or an earlier op bring
        self.graph = LoweredGraph(name, (), {}, {}, {}, {}, {}, [], (), {})
        self.node: Node
        self.item: int | None = None  # which of a list op's tensors is being lowered

    # --- the walk

    def run(self, node: Node) -> None:
        self.node = node
        count = len(self.graph.ops)
        if node.op == "placeholder":
            self.env[node] = self._input(node)
        elif node.op == "get_attr":
            self.env[node] = self._constant(node)
        elif node.op == "output":
            self.graph.outputs = tuple(self.current(leaf) for leaf in self._resolve(node.args[0]))
        else:
            assert node.op == "call_function", f"unexpected FX node kind {node.op}"
            self.env[node] = self._call(node)
        self._order(node, self.graph.ops[count:])

    def _order(self, node: Node, made: Sequence[IROp]) -> None:
        """Notes what makes which buffer, and what the graph wants `made` to run after."""
        self.made_by.update((name, op.name) for op in made for name in buffers_written(op))
        mark = order_of(node)
        if mark is not None:
            earlier = dict.fromkeys(self.made_by.get(leaf.buffer) for leaf in _named(self._resolve(mark.args)))
            names = tuple(name for name in earlier if name is not None)
            self.graph.order.update({op.name: names for op in made if names})

    def finish(self) -> LoweredGraph:
        return self.graph

    def _input(self, node: Node) -> Any:
        self.graph.inputs += (node.name,)
        value = node.meta.get("val")
        if _is_effect_token(node):
            return Handle(node.name)
        if isinstance(value, torch.Tensor):
            # Kernels get a tensor's data pointer, so an input's own storage offset is already applied.
            layout = self.layout(value, offset=sympy.S.Zero)
            self.graph.views[node.name] = View(node.name, layout)
            self.known.update(str(symbol) for size in (*layout.size, *layout.stride) for symbol in size.free_symbols)
            if value.is_neg() or value.is_conj():
                return self._resolved(self.graph.views[node.name])
            return self.graph.views[node.name]
        if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
            self.graph.scalars[node.name] = self.expr(value)
            self.known.update(str(symbol) for symbol in self.graph.scalars[node.name].free_symbols)
            return self.graph.scalars[node.name]
        return Handle(node.name)

    def _resolved(self, given: View) -> View:
        """An input whose numbers are the conjugates or negatives of what its memory holds, as they are."""
        name = f"{self.node.name}_resolved"
        view = View(name, given.layout)
        self.add(Extern(name, _owned(aten.alias.default), (given,), {}, view, origin=provenance(self.node)))
        self.given[name] = given
        return view

    def _constant(self, node: Node) -> Any:
        target: Any = self.gm
        for part in str(node.target).split("."):
            target = getattr(target, part)
        name = f"constant_{node.name}"
        self.graph.constants[name] = target
        if isinstance(target, torch.Tensor):
            value = node.meta.get("val", target)
            self.graph.views[name] = View(name, self.layout(value, offset=sympy.S.Zero))
            return self.graph.views[name]
        return Handle(name)

    def _call(self, node: Node) -> Any:
        args, kwargs = self._resolve(node.args), self._resolve(node.kwargs)
        if node.target is aten.copy_.default and isinstance(args[0], View) and args[0].buffer in self.given:
            args = (self.given[args[0].buffer], *args[1:])  # the caller's tensor, not our copy of it
        value = node.meta.get("val")
        target = node.target
        if target is done:
            return None
        assert callable(target), f"the target of a call is {target!r}"
        if target is operator.getitem and not isinstance(args[0], View | Handle):
            return args[0][args[1]]
        if isinstance(value, torch.SymInt | int) and not isinstance(value, bool) and not _binds(node):
            return self.expr(value)  # size arithmetic: known from the symbols
        if isinstance(value, torch.SymFloat) and is_number(value.node.expr) and not _binds(node):
            return self.expr(value)
        comm = self.comm_of(node)
        if comm is not None or is_wait(node):
            return self._communicate(node, args, kwargs, comm)
        if is_view(node) and isinstance(args[0], View):
            if self._is_described(args[0], value):
                return self._view(node, args[0], value)
            # Memory reuse must never meet a result that shares memory without saying so.
            return self.extern(_owned(target), args, kwargs, pure=True)
        rule = lowering_of(target)
        if rule is not None and self._can_generate(value, args, kwargs):
            count = len(self.graph.ops)
            try:
                return rule(self, *args, **kwargs)
            except Impossible:
                del self.graph.ops[count:]
        return self.extern(target, args, kwargs, fallback=target not in LIBRARY_CALLS and not carries_graphs(node))

    def _resolve(self, tree: Any) -> Any:
        def leaf(value: Any) -> Any:
            return self.current(self.env[value]) if isinstance(value, Node) else value

        return torch.fx.node.map_aggregate(tree, leaf)

    def current(self, value: Any) -> Any:
        """A view by its buffer's name after all mutations so far, in whatever structure it stands."""
        if not self.latest:
            return value

        def rename(leaf: Any) -> Any:
            if isinstance(leaf, View):
                root = self.graph.root(leaf.buffer)
                if root in self.latest:
                    return View(self.latest[root], leaf.layout)
            return leaf

        return tree_map(rename, value)

    def _can_generate(self, value: Any, args: Any, kwargs: Any) -> bool:
        outputs = [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if not outputs or not self.generates(outputs[0].device):
            return False
        device = outputs[0].device
        for tensor in outputs:
            if tensor.dtype not in GENERATED_DTYPES or tensor.device != device or tensor.layout != torch.strided:
                return False
        if any(isinstance(leaf, Handle) for leaf in _leaves((args, kwargs))):
            return False  # a number that only run time knows, or no strided tensor
        return all(view.dtype in GENERATED_DTYPES and view.layout.device == device for view in _views((args, kwargs)))

    # --- sizes and layouts

    def expr(self, size: Any) -> sympy.Expr:
        """A size as sympy; remembers what its symbols stood for when the graph was traced."""
        if isinstance(size, torch.SymInt | torch.SymFloat):
            expr = size.node.expr
            for symbol in expr.free_symbols:
                if str(symbol) not in self.graph.size_hints:
                    hint = symbol_hint(size, symbol)
                    if hint is not None:
                        self.graph.size_hints[str(symbol)] = hint
            return expr
        if isinstance(size, sympy.Expr):
            return size
        return sympy.Integer(int(size))

    def layout(self, tensor: torch.Tensor, offset: sympy.Expr | None = None) -> Layout:
        """Layout of a fake tensor; the offset is its own unless given."""
        return Layout(
            tensor.device,
            tensor.dtype,
            tuple(self.expr(extent) for extent in tensor.shape),
            tuple(self.expr(step) for step in tensor.stride()),
            self.expr(tensor.storage_offset()) if offset is None else offset,
        )

    def value_of(self, node: Node | None = None) -> Any:
        value = (node or self.node).meta["val"]
        return value if node is not None or self.item is None else value[self.item]

    @contextmanager
    def for_item(self, item: int) -> Iterator[None]:
        """Within, one result of a list op is lowered: names and layouts are that item's."""
        self.item = item
        try:
            yield
        finally:
            self.item = None

    def _view(self, node: Node, base: View, value: Any) -> Any:
        """The result of a view op as layouts over the buffer of `base`."""
        origin = self._argument_value(node)
        shift = base.layout.offset - self.expr(origin.storage_offset())

        def leaf(tensor: Any) -> Any:
            assert isinstance(tensor, torch.Tensor), f"view op returned {type(tensor).__name__}"
            layout = self.layout(tensor)
            return View(
                base.buffer, Layout(layout.device, layout.dtype, layout.size, layout.stride, layout.offset + shift)
            )

        return torch.utils._pytree.tree_map(leaf, value)

    def _is_described(self, base: View, value: Any) -> bool:
        """Whether a view op's results are layouts over the memory of `base`, as its elements stand there.

        Memory holds numbers as they are: conjugate and negative bits were resolved when it was written. So a view
        under which such a bit changes means other numbers.
        """
        origin = self._argument_value(self.node)
        return all(
            isinstance(leaf, torch.Tensor)
            and leaf.layout == torch.strided
            and leaf.dtype == base.dtype
            and leaf.is_conj() == origin.is_conj()
            and leaf.is_neg() == origin.is_neg()
            for leaf in torch.utils._pytree.tree_leaves(value)
        )

    def _argument_value(self, node: Node) -> torch.Tensor:
        first = node.args[0]
        assert isinstance(first, Node)
        value = first.meta.get("val")
        return value if isinstance(value, torch.Tensor) else getattr(self.gm, str(first.target))

    # --- making ops

    def name_for(self, part: int | str | None = None) -> str:
        parts = (self.node.name, self.item, part)
        return "_".join(str(part) for part in parts if part is not None)

    def add(self, op: IROp) -> None:
        for output in op.outputs:
            if isinstance(output, View):
                self.graph.views[output.buffer] = output
                sizes = output.layout.size
            else:
                sizes = (output.expr,) if output.expr is not None else ()
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
        """A kernel with one output, laid out as the fake tensor says unless `layout` is given.

        Raises Impossible when that layout has holes or overlaps (a kernel must define every element).
        """
        layout = layout or self.layout(self.value_of(), offset=sympy.S.Zero)
        view = View(name or self.name_for(), layout)
        if any(extent == 0 for extent in layout.size):
            return self._empty(view)
        if not layout.is_dense():
            raise Impossible(f"output strides {layout.stride} of size {layout.size} leave holes")
        made = self._accepted(canonical(without_trivial_reductions(body(view))), layout.device)
        self.add(Loops(view.buffer, layout.device, made, (view,), origin=provenance(self.node)))
        return view

    def update(self, target: View, body: Callable[[View], Body]) -> View:
        """A kernel that changes elements of `target` in place; `target` by the name it has from then on.

        `body` stores to the view that it is given.
        """
        root = self.graph.root(target.buffer)
        after = self._mutated_name(root)
        renamed = View(after.buffer, target.layout)
        made = self._accepted(canonical(body(renamed)), target.layout.device)
        if any(loop.size == 0 for loop in (*made.loops, *made.reduction)):
            return target
        before = self.latest.get(root, root)
        origin = provenance(self.node)
        self.add(Loops(after.buffer, target.layout.device, made, (), (after,), (before,), origin))
        self._renamed(after)
        return renamed

    def _accepted(self, body: Body, device: torch.device) -> Body:
        """`body`, if the device's generator takes it and can print all its index expressions; Impossible otherwise."""
        for expr in body.expressions():
            if not is_plain(expr):
                raise Impossible(f"the index or size {expr}")
        reason = self.refuse(device, body)
        if reason is not None:
            raise Impossible(reason)
        return body

    def replaces_its_input(self, x: View) -> bool:
        """Whether this node's result, of its first argument `x`, may be written over `x` itself.

        So it is where `x` is an input that the graph ends by copying the very result into, where nothing reads the
        old content from here on (this node's other arguments neither), and the result is not returned by itself.
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
            self.graph.root(view.buffer) == x.buffer for node in others for view in _views(self.env[node])
        ):
            return False
        later = [user for user in _users_through_views(given) if user not in self.env and user is not self.node]
        returned = any(user.op == "output" for user in _users_through_views(self.node))
        return later == copies and not returned

    def _empty(self, view: View) -> View:
        """Memory for a tensor without elements: a kernel with nothing to do would only be a special case for all."""
        layout = view.layout
        options = {"dtype": layout.dtype, "device": layout.device}
        call = torch.empty_strided
        self.add(Extern(view.buffer, call, (layout.size, layout.stride), options, view, origin=provenance(self.node)))
        return view

    def pointwise(
        self,
        function: Callable[..., Value],
        *args: Any,
        name: str | None = None,
        layout: Layout | None = None,
    ) -> View:
        """A kernel that computes each output element by `function` of the arguments' elements, broadcast.

        Arguments are views, numbers or sizes; `function` gets a Value for each, as it lies in memory.
        """

        def body(out: View) -> Body:
            loops, position = self.loops_over(out.layout)
            value = function(*(self.element(arg, position) for arg in args))
            return Body(loops, (), (self.store(out, position, value),))

        return self.loops(body, layout, name)

    def loops_over(self, layout: Layout) -> tuple[tuple[Loop, ...], tuple[sympy.Expr, ...]]:
        """Loops over every position of `layout`, outermost in memory first, and the position by dim."""
        position: list[sympy.Expr] = [sympy.S.Zero] * len(layout.size)
        loops: list[Loop] = []
        for dim in layout.dim_order():
            symbol = loop_symbol("p", len(loops))
            position[dim] = symbol
            loops.append(Loop(symbol, layout.size[dim]))
        return tuple(loops), tuple(position)

    def element(self, arg: Any, position: Sequence[sympy.Expr]) -> Value:
        """The element of `arg` that belongs to `position` of a tensor it is broadcast to."""
        if isinstance(arg, View):
            skip = len(position) - len(arg.size)
            at = tuple(sympy.S.Zero if is_one(extent) else position[skip + dim] for dim, extent in enumerate(arg.size))
            return Load(arg.buffer, arg.layout.at(at), arg.dtype)
        return self.scalar(arg)

    def scalar(self, arg: Any) -> Value:
        """A number or size as a value, in Python's own widest dtype of its kind."""
        if isinstance(arg, bool):
            return Constant(arg, torch.bool)
        if isinstance(arg, int):
            return Constant(arg, torch.int64)
        if isinstance(arg, float):
            return Constant(arg, torch.float64)
        if isinstance(arg, sympy.Expr):
            if arg.is_Integer:
                return Constant(int(arg), torch.int64)
            return Index(arg) if arg.is_integer else number(arg)
        raise Impossible(f"a {type(arg).__name__} argument")

    def store(self, out: View, position: Sequence[sympy.Expr], value: Value) -> Store:
        return Store(out.buffer, out.layout.at(tuple(position)), cast(value, out.dtype), out.dtype)

    def promoted(self, kind: PROMOTION, *args: Any) -> torch.dtype:
        """The dtype torch computes an element-wise op of these arguments in (float32 for low precision)."""
        return elementwise_dtypes(*(_promotable(arg) for arg in args), type_promotion_kind=kind)[0]

    def extern(
        self,
        target: Callable[..., Any],
        args: Any,
        kwargs: Mapping[str, Any],
        fallback: bool = False,
        pure: bool | None = None,
    ) -> Any:
        """A call of `target` as it stands; results are laid out as the fake tensors say.

        Whether it may be dropped when nobody reads its results is told by its schema unless `pure` does.
        """
        call = self._extern_op(target, args, kwargs, fallback)
        if pure is not None:
            call = dataclasses.replace(call, pure=pure)
        self.add(call)
        for view in call.mutates:
            self._renamed(view)
        return self._results(call)

    def _extern_op(self, target: Any, args: Any, kwargs: Mapping[str, Any], fallback: bool) -> Extern:
        mutated = dict.fromkeys(self.graph.root(view.buffer) for view in _mutated(target, args, kwargs))

        def mirror(value: Any, path: tuple[int, ...]) -> Any:
            if isinstance(value, tuple | list):
                parts = [mirror(item, (*path, at)) for at, item in enumerate(value)]
                return tuple(parts) if isinstance(value, tuple) else parts
            if value is None:
                return None
            returned = _returned_argument(target, path[0] if path else 0, args, kwargs)
            if returned is not None:
                return returned
            name = "_".join((self.node.name, *map(str, path)))
            if target is with_effects and path == (0,):
                return Handle(name)
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                return View(name, self.layout(value, offset=sympy.S.Zero))
            return Handle(name, self.expr(value) if isinstance(value, torch.SymInt) else None)

        result = mirror(self.node.meta.get("val"), ())
        out = isinstance(result, View) and target in OUT_VARIANTS and result.layout.is_dense()
        return Extern(
            self.node.name,
            target,
            tuple(args),
            dict(kwargs),
            result,
            tuple(self._mutated_name(root) for root in mutated),
            out,
            fallback,
            pure=not mutated and not _has_side_effects(target),
            origin=provenance(self.node),
        )

    def _mutated_name(self, root: str) -> View:
        base = name = f"{root}__{self.node.name}"
        times = 1
        while name in self.graph.aliases:  # a node may change one buffer several times
            times += 1
            name = f"{base}_{times}"
        renamed = View(name, self.graph.views[root].layout)
        self.mutated[renamed.buffer] = root
        return renamed

    def _renamed(self, view: View) -> None:
        root = self.mutated[view.buffer]
        self.graph.aliases[view.buffer] = self.latest.get(root, root)
        self.graph.views[view.buffer] = view
        self.latest[root] = view.buffer

    def _results(self, call: Extern) -> Any:
        def leaf(value: Any) -> Any:
            return value.expr if isinstance(value, Handle) and value.expr is not None else value

        return self.current(tree_map(leaf, call.result))

    def _communicate(self, node: Node, args: Any, kwargs: Any, comm: Any) -> Any:
        if is_wait(node):
            source = args[0]
            if not isinstance(source, View) or source.buffer not in self.flying:
                return source  # a wait for what never was in flight is the tensor itself
            result = View(node.name, source.layout)
            self.graph.aliases[result.buffer] = source.buffer
            # The wait covers its whole start: results that were not waited for keep their own wait.
            self.add(Wait(node.name, source, result, provenance(node)))
            return result
        call = self._extern_op(node.target, args, kwargs, fallback=False)
        if not comm.asynchronous:
            self.add(dataclasses.replace(call, comm=comm.comm, pure=False))
            for view in call.mutates:
                self._renamed(view)
            return self._results(call)
        self.add(Start(node.name, call, comm.comm, provenance(node)))
        for view in call.mutates:
            self._renamed(view)
        self.flying.update(result.buffer for result in call.outputs)
        return self._results(call)


def is_wait(node: Node) -> bool:
    return "wait_tensor" in str(node.target)


def is_view(node: Node) -> bool:
    """Whether every result of the node is a view of its first argument, by the op's schema."""
    target = node.target
    if target is torch.ops.aten._unsafe_view.default or target is torch.ops.aten.lift_fresh.default:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    returns = target._schema.returns
    return (
        bool(returns)
        and all(item.alias_info is not None and not item.alias_info.is_write for item in returns)
        and not any(arg.alias_info is not None and arg.alias_info.is_write for arg in target._schema.arguments)
    )


def _users_through_views(node: Node) -> list[Node]:
    """Every node that reads the memory of `node`, views of it left out and their own readers listed."""
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if is_view(user):
                stack.append(user)
            else:
                found[user] = None
    return list(found)


@lru_cache(None)
def _owned(target: Callable[..., Any]) -> Callable[..., Any]:
    return owned(target)


def _is_effect_token(node: Node) -> bool:
    """Whether the input orders ops with side effects; at run time it may be a tensor or None."""
    return any(user.target is with_effects and user.args[0] is node for user in node.users)


def _binds(node: Node) -> bool:
    return bool(node.meta.get("unbacked_bindings"))


def _leaves(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, View))


def _views(tree: Any) -> list[View]:
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, View)]


def _named(tree: Any) -> list[View | Handle]:
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, View | Handle)]


def _mutated(target: Any, args: Any, kwargs: Mapping[str, Any]) -> list[View]:
    """Views that the call overwrites, by its schema."""
    if not isinstance(target, torch._ops.OpOverload):
        return []
    found: list[View] = []
    for at, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[at] if at < len(args) else None)
            found.extend(_views(given))
    return found


def _returned_argument(target: Any, position: int, args: Any, kwargs: Mapping[str, Any]) -> View | None:
    """The argument that the call returns as result `position` (in-place and out= ops)."""
    if not isinstance(target, torch._ops.OpOverload) or position >= len(target._schema.returns):
        return None
    alias = target._schema.returns[position].alias_info
    if alias is None or not alias.is_write:
        return None
    for at, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == alias.before_set:
            given = kwargs.get(argument.name, args[at] if at < len(args) else None)
            return given if isinstance(given, View) else None
    return None


def _has_side_effects(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        if "assert" in name or "sym_constrain" in name or not target._schema.returns:
            return True
        return torch.Tag.nondeterministic_seeded in target.tags or name.startswith("_c10d_functional")
    return not getattr(target, "__module__", "").startswith(("_operator", "math"))


def _promotable(arg: Any) -> Any:
    """What torch's promotion rules look at: a dtype and whether it is a tensor, a 0-dim tensor or a number."""
    if isinstance(arg, View):
        return _tensor_of(len(arg.size), arg.dtype)
    if isinstance(arg, sympy.Expr):
        return 1 if arg.is_integer else 1.0
    return arg


@lru_cache(None)
def _tensor_of(dims: int, dtype: torch.dtype) -> Tensor:
    with _disable_current_modes():  # a compiler runs among fake tensors, which take a hundred times as long to make
        return torch.empty([1] * dims, dtype=dtype, device="meta")


__all__ = ["Context", "lower", "provenance"]
