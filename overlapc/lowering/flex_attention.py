"""Lowers flex attention: torch's higher-order op becomes one kernel, with its score and mask functions as bodies.

    score_mod(score, b, h, q, k) = tanh(score / 20) * 20    mask_mod(b, h, q, k) = (q >= k) & (docs[q] == docs[k])
 -> score = tanh(score[0] / 20) * 20                        mask = p2 >= p3 & docs[p2] == docs[p3]

The functions are graphs of scalars. They are traced again, with float32 scores as in eager and with our decompositions,
and lowered like any graph; the resulting kernels of one element each are inlined into one another.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from overlapc.errors import CompileError
from overlapc.fx.decompositions import decompositions
from overlapc.fx.written_numbers import written_number
from overlapc.ir.body import Body, Cast, Constant, Index, Load, Loop, Op, Store, Value, as_number, topological
from overlapc.ir.conversions import as_read, cast, constant
from overlapc.ir.indexing import Ranges, loop_symbol, simplify, substitute
from overlapc.ir.ops import GRADIENT, SCORE, Attention, BlockLists, Handle, Loops, LoweredGraph, View
from overlapc.ir.rewriting import rewrite_values
from overlapc.ir.settle import settled
from overlapc.lowering.context import Lowering
from overlapc.lowering.graph import lower
from overlapc.lowering.precision import FORGIVING, coarsened
from overlapc.lowering.provenance import provenance
from overlapc.lowering.table import Impossible, lowers
from overlapc.lowering.target import Target

# Positions of the lists in `BlockMask.as_tuple()` (torch 2.11 to 2.13); block sizes and the mask function come last.
_LISTS = {"keys": 2, "full_keys": 4, "queries": 6, "full_queries": 8}
_SAMPLED_BLOCKS, _SAMPLES = 64, 8  # blocks per side and positions per block that estimate the share of kept blocks
_Call: TypeAlias = tuple[Handle, Sequence[Any]]  # graph of a function, and the tensors that it reads
_ROW = sympy.Symbol("row", integer=True, nonnegative=True)
_ON_POSITIONS: Mapping[str, Callable[..., Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "abs": torch.abs, "neg": operator.neg,
    "floor_div": operator.floordiv, "remainder": operator.mod, "logical_and": torch.logical_and,
    "logical_or": torch.logical_or, "logical_not": torch.logical_not, "logical_xor": torch.logical_xor,
    "bitwise_and": torch.bitwise_and, "bitwise_or": torch.bitwise_or, "bitwise_not": torch.bitwise_not,
    "where": torch.where, "maximum": torch.maximum, "minimum": torch.minimum,
}  # fmt: skip


@lowers(flex_attention)
def forward(
    context: Lowering,
    query: View,
    key: View,
    value: View,
    score_mod: Handle,
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: Mapping[str, Any],
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> tuple[View, ...]:
    tensors = {"query": query, "key": key, "value": value}

    def attention() -> Attention:
        space = _Space(context, tensors)
        results = dict(zip(("out", "logsumexp", "maximum"), space.results(context.value_of()), strict=True))
        plain = space.attention(results, block_mask, scale)
        return space.with_functions(plain, (score_mod, score_buffers), (block_mask[-1], mask_buffers))

    return _added_or_refused(context, query, attention).outputs


@lowers(flex_attention_backward)
def backward(
    context: Lowering,
    query: View,
    key: View,
    value: View,
    out: View,
    logsumexp: View,
    grad_out: View | None,
    grad_logsumexp: View | None,
    score_mod: Handle,
    joint: Handle | None,
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: Mapping[str, Any],
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> Any:
    tensors = {"query": query, "key": key, "value": value, "out": out, "logsumexp": logsumexp}
    gradients = context.value_of()

    def attention() -> Attention:
        if joint is None or grad_out is None:
            raise Impossible("only its logsumexp has a gradient")
        _, *others = context.graph.constants[joint.buffer].graph.output_node().args[0]
        if any(gradient is not None for gradient in others):
            raise Impossible("a tensor that its score function reads has a gradient")
        tensors["grad_out"] = grad_out
        if grad_logsumexp is not None:
            tensors["grad_logsumexp"] = grad_logsumexp
        space = _Space(context, tensors)
        results = dict(zip(("grad_query", "grad_key", "grad_value"), space.results(gradients[:3]), strict=True))
        plain = space.attention(results, block_mask, scale)
        mask = (block_mask[-1], mask_buffers)
        return space.with_functions(plain, (score_mod, score_buffers), mask, (joint, score_buffers))

    return (*_added_or_refused(context, query, attention).outputs, tuple(None for _ in gradients[3]))


def _added_or_refused(context: Lowering, query: View, attention: Callable[[], Attention]) -> Attention:
    """Add the attention to the graph, or raise Impossible if there is no kernel for it; note which for the report."""
    sizes, dtype = ", ".join(map(str, query.size)), str(query.dtype).removeprefix("torch.")
    backward = " backward" if context.node.target is flex_attention_backward else ""
    what = f"flex attention{backward} of [{sizes}] {dtype}"
    try:
        made = attention()
    except Impossible as reason:
        context.graph.attention.append(f"{what}: calls torch's op, which computes and stores every score: {reason}")
        raise
    if made.kept is None:
        blocks = "; the blocks that its mask keeps are known only at run time, so FLOPs count all blocks"
    else:
        blocks = f"; its mask keeps {made.kept:.0%} of the blocks" if made.mask else ""
    context.graph.attention.append(f"{what}: generated kernel{blocks}")
    context.add(made)
    return made


def _is_fixed(view: View) -> bool:
    """Whether the view's size, strides and offset are static."""
    return all(part.is_Integer for part in (*view.layout.size, *view.layout.stride, view.layout.offset))


class _Space:
    """The scores of one attention: their loops b, h, q and k, and the functions over them."""

    def __init__(self, context: Lowering, tensors: Mapping[str, View]) -> None:
        self.context = context
        self.tensors = tensors
        query, key, value = (tensors[role] for role in ("query", "key", "value"))
        sizes = (*query.size[:3], key.size[2])
        if not all(map(_is_fixed, tensors.values())):
            raise Impossible("a size that is known only at run time")
        if any(size == 0 for size in (*query.size, *key.size, *value.size)):
            raise Impossible("a tensor without elements")
        if query.size[0] != key.size[0]:
            raise Impossible("queries and keys of different batch sizes")
        if len({view.dtype for view in (query, key, value)}) > 1:
            raise Impossible("queries, keys and values of different dtypes")
        self.loops = tuple(Loop(loop_symbol("p", at), size) for at, size in enumerate(sizes))
        self.captured: dict[str, View] = {}

    @property
    def ranges(self) -> Ranges:
        return tuple((loop.symbol, sympy.S.Zero, loop.size - 1) for loop in self.loops)

    def results(self, values: Sequence[Any]) -> list[View]:
        """Return the op's results, with the layouts that torch's op gives them."""
        layouts = [self.context.layout(value, offset=sympy.S.Zero) for value in values]
        return [View(self.context.name_for(at), layout) for at, layout in enumerate(layouts)]

    def attention(self, results: Mapping[str, View], block_mask: Sequence[Any], scale: float) -> Attention:
        """Return the attention without functions; raise Impossible if the device has no kernel for it."""
        *_, query_size, key_size, _ = block_mask
        needed = ("keys", "queries") if "grad_out" in self.tensors else ("keys",)
        found = {kind: (block_mask[at], block_mask[at + 1]) for kind, at in _LISTS.items() if kind.endswith(needed)}
        lists = {kind: pair for kind, pair in found.items() if None not in pair}
        if not lists.keys() >= {*needed} or not isinstance(query_size, int) or not isinstance(key_size, int):
            raise Impossible("a mask without lists of its blocks")
        blocks = BlockLists(query_size, key_size, lists)
        if not all(map(_is_fixed, blocks.views)):
            raise Impossible("a mask whose size is known only at run time")
        name, device, origin = (
            self.context.node.name,
            self.tensors["query"].layout.device,
            provenance(self.context.node),
        )
        plain = Attention(
            name, device, self.tensors, results, blocks, scale, None, None, None, captured=(), kept=None, origin=origin
        )
        return self._accepted(plain)

    def _accepted(self, made: Attention) -> Attention:
        refusal = self.context.target.refuse_attention(made)
        if refusal is not None:
            raise Impossible(refusal)
        return made

    def with_functions(
        self, plain: Attention, score_mod: _Call, mask_mod: _Call, joint: _Call | None = None
    ) -> Attention:
        """Return `plain` with its functions; raise Impossible if they cannot be generated."""
        score = self.function(*score_mod, [SCORE])[0]
        mask = self.function(*mask_mod, [])[0]
        gradient = GRADIENT if joint is None else self.function(*joint, [SCORE], [GRADIENT])[0]
        assert mask is not None, "the mask function returns nothing"
        made = dataclasses.replace(
            plain,
            score=None if score is SCORE else self._body("score", score),
            mask=None if isinstance(mask, Constant) and mask.number else self._body("mask", mask),
            gradient=None if gradient is GRADIENT else self._body("gradient", gradient),
            captured=tuple(self.captured.values()),
            kept=kept_share(mask, self.loops, plain.blocks.query_size, plain.blocks.key_size),
        )
        return self._accepted(made)

    def _body(self, name: str, value: Value | None) -> Body:
        assert value is not None, f"the {name} function returns nothing"
        dtype = torch.bool if name == "mask" else torch.float32
        body = Body(self.loops, (), (Store(name, sympy.S.Zero, cast(value, dtype), dtype),))
        return coarsened(body, self.tensors["query"].dtype in FORGIVING)

    def function(
        self, given: Handle, buffers: Sequence[Any], before: Sequence[Value], behind: Sequence[Value] = ()
    ) -> list[Value | None]:
        """Return the results, as values, of a function of `before`, the four positions, `behind` and tensors."""
        if not all(isinstance(buffer, View) for buffer in buffers):
            raise Impossible("its functions read a number that is known only at run time")
        if not all(map(_is_fixed, buffers)):
            raise Impossible("its functions read a tensor whose size is known only at run time")
        module = self.context.graph.constants[given.buffer]
        assert isinstance(module, GraphModule), f"{given.buffer} is no graph"
        positions = [Index(loop.symbol, torch.int32) for loop in self.loops]
        scalars: list[Value] = [*before, *positions, *behind]
        inner = self._lowered(module, [value.dtype for value in scalars], buffers)
        return _Inliner(self, inner.inputs, scalars, buffers).results(inner)

    def _lowered(self, module: GraphModule, scalars: Sequence[torch.dtype], buffers: Sequence[View]) -> LoweredGraph:
        """Return `module` lowered to loop IR; cached unless it holds tensors of its own."""
        holds = bool(module.graph.find_nodes(op="get_attr"))
        forms = tuple(dataclasses.replace(view.layout, offset=sympy.S.Zero) for view in buffers)
        key = (str(module.graph), tuple(scalars), forms)
        found = None if holds else self.context.functions.get(key)
        if found is None:
            traced = _traced(module, scalars, buffers, self.tensors["query"].layout.device)
            try:
                found = lower(traced, "function", target=Target(refuse=self.context.target.refuse))
            except CompileError as error:
                raise Impossible(str(error).splitlines()[0]) from error
            self.context.functions[key] = found
        return found


def _traced(
    module: GraphModule, scalars: Sequence[torch.dtype], buffers: Sequence[View], device: torch.device
) -> GraphModule:
    """Trace `module` again, on scalars of these dtypes, as a graph that returns a tuple."""
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty((), dtype=dtype, device=device) for dtype in scalars]
        for view in buffers:
            size, stride = ([int(part) for part in parts] for parts in (view.layout.size, view.layout.stride))
            fakes.append(torch.empty_strided(size, stride, dtype=view.dtype, device=view.layout.device))

        def call(*args: Any) -> tuple[Any, ...]:
            results = module(*args)
            return tuple(results) if isinstance(results, list | tuple) else (results,)

        return make_fx(call, decomposition_table=decompositions())(*fakes)


class _Inliner:
    """Inlines the kernels of a lowered graph of scalars into one another."""

    def __init__(self, space: _Space, inputs: Sequence[str], scalars: Sequence[Value], buffers: Sequence[View]) -> None:
        self.space = space
        self.values = dict(zip(inputs, scalars, strict=False))  # scalar buffer -> its value
        self.rows: dict[str, Value] = {}  # 1-dim tensor that the functions compute -> its element at `_ROW`
        self.buffers = dict(zip(inputs[len(scalars) :], buffers, strict=True))

    def results(self, graph: LoweredGraph) -> list[Value | None]:
        for name, held in graph.constants.items():
            number = written_number(held)
            if number is None or isinstance(number, complex):
                raise Impossible("its functions contain a constant tensor")
            self.values[name] = constant(number, held.dtype)
        for kernel in graph.ops:
            if not isinstance(kernel, Loops) or len(kernel.body.loops) > 1 or kernel.body.reduction or kernel.mutates:
                raise Impossible(f"its functions do more than element-wise arithmetic: {' '.join(kernel.origin.fx)}")
            for store in kernel.body.stores:
                if kernel.body.loops:
                    self.rows[store.buffer] = self._row(store, kernel.body.loops[0].symbol)
                else:
                    self.values[store.buffer] = as_read(store, self._in_place(store.value))
        return [None if view is None else self._in_place(self._element(view)) for view in graph.outputs]

    def _row(self, store: Store, along: sympy.Symbol) -> Value:
        """Return the value that a store to a 1-dim tensor writes at `_ROW`, as for `bias[h]` in `bias[h][q]`."""
        if store.index != along:
            raise Impossible(f"its functions do not store {store.buffer} contiguously")
        inner = rewrite_values([store.value], lambda expr: substitute(expr, {along: _ROW}))
        return as_read(store, self._in_place(inner[store.value]))

    def _element(self, view: View) -> Value:
        return Load(view.buffer, view.layout.offset, view.dtype)

    def _in_place(self, value: Value) -> Value:
        """Express `value` by positions and tensors of the outer graph; conditions that sizes decide are resolved."""
        return rewrite_values([value], replace=self._settle)[value]

    def _settle(self, value: Value) -> Value | None:
        if isinstance(value, Load):
            return self._load(value)
        if isinstance(value, Cast):
            return cast(value.arg, value.to) if isinstance(value.arg, Index | Constant) else None
        return settled(value, self.space.ranges)

    def _load(self, load: Load) -> Value | None:
        if load.buffer in self.values:
            return self.values[load.buffer]
        known = {symbol: value.expr for symbol, value in load.indirect if isinstance(value, Index)}
        known |= {symbol: sympy.Integer(value.number) for symbol, value in load.indirect if isinstance(value, Constant)}
        indirect = tuple((symbol, value) for symbol, value in load.indirect if symbol not in known)
        at = substitute(load.index, known)
        mask = None if load.mask is None or as_number(load.mask) else load.mask
        if load.buffer in self.rows:
            if indirect or mask is not None:
                raise Impossible(f"its functions read {load.buffer}, which they compute, at indices from data")
            row = self.rows[load.buffer]
            return rewrite_values([row], lambda expr: simplify(substitute(expr, {_ROW: at}), self.space.ranges))[row]
        if load.buffer not in self.buffers:
            return None  # already a tensor of the outer graph
        view = self.buffers[load.buffer]
        self.space.captured[view.buffer] = view
        index = simplify(at + view.layout.offset, self.space.ranges)
        return Load(view.buffer, index, load.memory_dtype, mask, indirect)


# --- the share of scores that is computed


def kept_share(mask: Value, loops: Sequence[Loop], query_size: int, key_size: int) -> float | None:
    """Return the share of blocks in which the mask keeps a sampled position; None if it depends on more than q, k."""
    _, _, queries, keys = loops
    if isinstance(mask, Constant) and (queries.size > query_size or keys.size > key_size):
        return None  # only the lists of blocks tell
    free = {queries.symbol, keys.symbol}
    parts = topological([mask])
    if not all(isinstance(part, Index | Constant | Cast | Op) for part in parts):
        return None
    if any(not expr.free_symbols <= free for part in parts for expr in part.indices()):
        return None
    with _disable_current_modes():
        q = _sampled(int(queries.size), query_size)
        k = _sampled(int(keys.size), key_size)
        found = _on_positions(parts, {queries.symbol: q.view(-1, 1), keys.symbol: k.view(1, -1)})
        if found is None:
            return None
        blocks = found.expand(q.numel(), k.numel()).view(len(q), _SAMPLES, len(k), _SAMPLES)
        return float(blocks.any(3).any(1).double().mean())


def _sampled(length: int, block: int) -> torch.Tensor:
    """Return sampled positions as [blocks, positions]; they include the first and the last position of each block."""
    block = min(block, length)
    count = -(-length // block)
    step = -(-count // _SAMPLED_BLOCKS)
    first = torch.arange(0, count, step).view(-1, 1) * block
    within = torch.arange(_SAMPLES) * (block - 1) // (_SAMPLES - 1)
    return (first + within).clamp(max=length - 1)


def _on_positions(parts: Sequence[Value], positions: Mapping[sympy.Symbol, torch.Tensor]) -> torch.Tensor | None:
    """Evaluate the last of `parts` for all positions; None if one of them is not arithmetic on positions."""
    known: dict[Value, torch.Tensor] = {}
    for part in parts:
        if isinstance(part, Constant):
            known[part] = torch.tensor(part.number, dtype=part.dtype)
        elif isinstance(part, Index) and (part.expr in positions or part.expr.is_Integer):
            at = positions[part.expr] if part.expr in positions else torch.tensor(int(part.expr))
            known[part] = at.to(part.dtype)
        elif isinstance(part, Cast):
            known[part] = known[part.arg].to(part.to)
        elif isinstance(part, Op) and part.name in _ON_POSITIONS:
            known[part] = _ON_POSITIONS[part.name](*(known[arg] for arg in part.args))
        else:
            return None
    return known[parts[-1]].bool()
