"""Ops: the elements of a lowered graph. Each becomes one node of a schedule, alone or fused with others.

A *buffer* is a name for memory; a *view* is a buffer with a layout. Layouts are those of eager PyTorch (the fake
tensors of the FX graph), so a view op of torch does not become an op here, but another layout of the same buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Max

from overlapc.ir.body import Body, Load
from overlapc.ir.indexing import flat_index, is_dense, is_one

# Returns the reason why a kernel is unsupported on a device; None if it is supported.
Refuse = Callable[[torch.device, Body], str | None]


def nothing_refused(device: torch.device, body: Body) -> str | None:
    """Accept every kernel (a `Refuse`)."""
    return None


# The loads in the functions of an attention: a score, and in backward the gradient of the function's result.
SCORE = Load("score", sympy.S.Zero, torch.float32)
GRADIENT = Load("gradient", sympy.S.Zero, torch.float32)


@lru_cache(10_000)  # a model has few shapes
def _storage_numel(size: tuple[sympy.Expr, ...], stride: tuple[sympy.Expr, ...], offset: sympy.Expr) -> sympy.Expr:
    if any(extent == 0 for extent in size):
        return sympy.S.Zero
    last = sympy.Add(*((extent - 1) * step for extent, step in zip(size, stride, strict=True)))
    return sympy.expand(offset + last + 1)


@lru_cache(10_000)
def _steps(size: tuple[sympy.Expr, ...], stride: tuple[sympy.Expr, ...]) -> tuple[sympy.Expr, ...]:
    if all(step.is_Integer or step.is_Symbol for step in stride):
        return stride
    runs = {
        sympy.expand(sympy.Mul(*size[start:end])) for end in range(len(size) + 1) for start in range(end)
    }  # if one of these is 0, the tensor is empty

    def without_bound(step: sympy.Expr) -> sympy.Expr:
        for bound in step.atoms(Max):
            extents = [arg for arg in bound.args if arg != 1]
            if len(extents) == 1 < len(bound.args) and sympy.expand(extents[0]) in runs:
                step = step.xreplace({bound: extents[0]})
        return sympy.expand(step)

    return tuple(map(without_bound, stride))


@dataclass(frozen=True, slots=True)
class Layout:
    """A strided tensor's description; sizes, strides and offset count elements and may be symbolic.

    Strides are eager's, also of a tensor that may be empty: `Max(1, n)` where a size n may be 0. The methods take n
    instead, which is the same for a tensor with elements; then it is known which layouts have no gaps.
    """

    device: torch.device
    dtype: torch.dtype
    size: tuple[sympy.Expr, ...]
    stride: tuple[sympy.Expr, ...]
    offset: sympy.Expr = sympy.S.Zero

    def at(self, position: tuple[sympy.Expr, ...]) -> sympy.Expr:
        """Return the element number of `position` in the buffer."""
        return flat_index(position, self._steps(), self.offset)

    def is_dense(self) -> bool:
        """Whether the layout has no gaps and no overlaps, in any order of dims."""
        return is_dense(self.size, self._steps())

    def storage_numel(self) -> sympy.Expr:
        """Return the number of elements from the buffer's start to the last reachable one; 0 for an empty tensor."""
        return _storage_numel(self.size, self._steps(), self.offset)

    def storage_bytes(self) -> sympy.Expr:
        """Return `storage_numel` in bytes."""
        return self.storage_numel() * self.dtype.itemsize

    def dim_order(self) -> list[int]:
        """Return the dims of a size other than 1, from the outermost in memory to the innermost.

        They stay in order if a stride is 0.
        """

        def key(dim: int) -> tuple[int, int]:
            step = self.stride[dim]
            return (-(int(step) if step.is_Integer else _rank(step)), dim)

        real = [dim for dim, extent in enumerate(self.size) if not is_one(extent)]
        return sorted(real, key=key) if all(self.stride[dim] != 0 for dim in real) else real

    def _steps(self) -> tuple[sympy.Expr, ...]:
        return _steps(self.size, self.stride)


def _rank(stride: sympy.Expr) -> int:
    """Return a number that orders symbolic strides as large sizes would."""
    return int(stride.subs(dict.fromkeys(stride.free_symbols, 4099)))


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: a buffer and a layout."""

    buffer: str
    layout: Layout

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def size(self) -> tuple[sympy.Expr, ...]:
        return self.layout.size


@dataclass(frozen=True, slots=True)
class Returned(View):
    """A result of the graph that is a tensor of its own for the FX node `node`, although another may be an equal view.

    conjugated, negated: whether a bit of the tensor says that its elements are the conjugates or negatives of those in
    memory.
    """

    node: str
    conjugated: bool = False
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Handle:
    """A run-time value other than a strided tensor: a number, a size (with `expr`), a module, a sparse tensor."""

    buffer: str
    expr: sympy.Expr | None = None  # of an integer: what its readers see
    flag: sympy.Symbol | None = None  # of a bool: the symbol that is 1 in expressions if it is true, else 0

    @property
    def defines(self) -> sympy.Symbol | None:
        """The symbol that is known once this value is."""
        if self.expr is not None and self.expr.is_Symbol:
            return self.expr
        return self.flag


@dataclass(frozen=True, slots=True)
class Provenance:
    """The FX nodes and user code that an op comes from."""

    fx: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()  # "file:line: code" of each innermost user frame
    module: str = ""  # path of the nn.Module, such as "layers.3.mlp"

    @property
    def source(self) -> str:
        """The first line, or "" without one."""
        return self.lines[0] if self.lines else ""

    def joined(self, other: Provenance) -> Provenance:
        """Return the union of two origins without duplicates; module and lines of this one come first."""
        fx, lines = (tuple(dict.fromkeys(both)) for both in (self.fx + other.fx, self.lines + other.lines))
        return Provenance(fx, lines, self.module or other.module)


@dataclass(frozen=True, slots=True)
class Loops:
    """A generated kernel: `body` writes `outputs` on `device`.

    It may also change memory in place: `mutates` are the changed buffers by their names after the change (to which the
    body stores), `before` are their names before the change.
    """

    name: str
    device: torch.device
    body: Body
    outputs: tuple[View, ...]
    mutates: tuple[View, ...] = ()
    before: tuple[str, ...] = ()
    origin: Provenance = field(default_factory=Provenance, compare=False)


@dataclass(frozen=True, slots=True)
class Combo:
    """Independent generated kernels in one launch; `overlapc.fusion.combo` decides which kernels may share a launch."""

    name: str
    parts: tuple[Loops, ...]
    origin: Provenance = field(default_factory=Provenance, compare=False)

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def outputs(self) -> tuple[View, ...]:
        return tuple(view for part in self.parts for view in part.outputs)

    @property
    def mutates(self) -> tuple[View, ...]:
        return tuple(view for part in self.parts for view in part.mutates)


@dataclass(frozen=True, slots=True)
class BlockLists:
    """The blocks of scores that are computed: torch's `BlockMask`, read at run time.

    `lists` has, by kind, the number of blocks in each row of blocks, and their indices: "keys" and "full_keys" for
    blocks of queries, "queries" and "full_queries" for blocks of keys. In full blocks, no score is masked.
    """

    query_size: int  # queries in a block
    key_size: int  # keys in a block
    lists: Mapping[str, tuple[View, View]]

    @property
    def views(self) -> tuple[View, ...]:
        """The views of all tensors of the lists, which a kernel reads."""
        return tuple(view for pair in self.lists.values() for view in pair)


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention over blocks of scores with functions of each score: one generated kernel, forward or backward.

        score[b, h, q, k] = sum over d of query[b, h, q, d] * key[b, h // group, k, d] * scale

    `tensors` and `results` are keyed by role. Forward computes out, logsumexp and maximum (both to base 2) from query,
    key and value; backward computes grad_query, grad_key and grad_value from all of these except the maximum, grad_out
    and possibly grad_logsumexp. Functions are bodies over the loops b, h, q and k that store one value: `score` and
    `gradient` a float32 computed from SCORE (and GRADIENT), `mask` a bool, false for masked scores. If a function is
    None, the score or the gradient is used unchanged, or no score is masked.
    """

    name: str
    device: torch.device
    tensors: Mapping[str, View]
    results: Mapping[str, View]
    blocks: BlockLists
    scale: float
    score: Body | None
    mask: Body | None
    gradient: Body | None
    captured: tuple[View, ...]  # tensors that the functions read
    kept: float | None  # share of the blocks that are not masked; None if known only at run time
    origin: Provenance = field(default_factory=Provenance, compare=False)

    @property
    def is_backward(self) -> bool:
        return "grad_out" in self.tensors

    @property
    def functions(self) -> tuple[Body, ...]:
        """The functions that are not None."""
        return tuple(body for body in (self.score, self.mask, self.gradient) if body is not None)

    @property
    def inputs(self) -> tuple[View, ...]:
        """All views that the kernel reads."""
        return (*self.tensors.values(), *self.blocks.views, *self.captured)

    @property
    def outputs(self) -> tuple[View, ...]:
        return tuple(self.results.values())


RefuseAttention = Callable[[Attention], str | None]


def attention_refused(op: Attention) -> str | None:
    """Reject every attention (a `RefuseAttention`), for devices without generated attention kernels."""
    return f"no generated attention on {op.device.type}"


@dataclass(frozen=True, slots=True)
class Extern:
    """A call of `target`: a library kernel, a fallback or any other op without generated code.

    `args` and `kwargs` hold views, handles, sympy sizes and Python values. `result` has the structure of the returned
    value, with a view for each tensor and a handle for everything else.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    mutates: tuple[View, ...] = ()  # by their names after the mutation
    out: bool = False  # the call takes its one result as `out=`
    fallback: bool = False  # generated code was possible in principle; counted and reported
    pure: bool = True  # may be dropped if its result is not read
    comm: Any = None  # set on communication that blocks, or whose kind is unknown: a barrier for other communication
    origin: Provenance = field(default_factory=Provenance, compare=False)

    @property
    def arguments(self) -> tuple[Any, dict[str, Any]]:
        """`args` and `kwargs` in one structure."""
        return self.args, dict(self.kwargs)

    @property
    def outputs(self) -> tuple[View | Handle, ...]:
        """The views and handles that the call defines, without arguments that it returns."""
        given = {view.buffer for view in (*inputs_of(self), *self.mutates)}
        return tuple(leaf for leaf in named_in(self.result) if leaf.buffer not in given)


@dataclass(frozen=True, slots=True)
class Start:
    """A launch of a collective by `call`; it is then in flight, and its outputs may be read only after their `Wait`."""

    name: str
    call: Extern
    comm: Any  # overlapc.schedule.model.Comm, opaque here
    origin: Provenance = field(default_factory=Provenance, compare=False)

    @property
    def outputs(self) -> tuple[View | Handle, ...]:
        return self.call.outputs


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for the output `source` of a collective; `result` is another name for the same memory."""

    name: str
    source: View
    result: View
    origin: Provenance = field(default_factory=Provenance, compare=False)

    @property
    def outputs(self) -> tuple[View, ...]:
        return (self.result,)


Kernel = Loops | Combo | Attention
IROp = Kernel | Extern | Start | Wait
_LEAVES = frozenset((View, Handle, str, int, float, bool, type(None)))  # the common leaves of structures


def loops_of(op: IROp) -> tuple[Loops, ...]:
    """Return the loop kernels that a launch of `op` runs; none for an op without generated loops."""
    if isinstance(op, Combo):
        return op.parts
    return (op,) if isinstance(op, Loops) else ()


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists and dicts, in the order of torch's pytrees; a view is a leaf."""
    kind = type(tree)
    if kind in _LEAVES:  # arguments of almost every op: walked here, because torch's function takes ten times as long
        return [tree]
    if kind is tuple or kind is list:
        return [leaf for branch in tree for leaf in tree_leaves(branch)]
    if kind is dict:
        return [leaf for branch in tree.values() for leaf in tree_leaves(branch)]
    return pytree.tree_leaves(tree)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the structure with `function` applied to each leaf."""
    return pytree.tree_map(function, tree)


def named_in(tree: Any) -> list[View | Handle]:
    """Return the views and handles in a structure."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, View | Handle)]


def views_in(tree: Any) -> list[View]:
    """Return the views in a structure."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, View)]


def inputs_of(op: IROp) -> Iterator[View | Handle]:
    """Yield the views and handles that an extern, start, wait or attention reads; other kernels read through loads."""
    if isinstance(op, Attention):
        yield from op.inputs
    elif isinstance(op, Wait):
        yield op.source
    elif isinstance(op, Start):
        yield from inputs_of(op.call)
    elif isinstance(op, Extern):
        yield from named_in(op.arguments)


# Namespaces whose ops depend only on the elements of their tensors, unless they have an argument `storage_offset`.
_NAMESPACES = frozenset(
    {"aten", "prims", "fsdp", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "overlapc"}
)


def sees_where_memory_begins(op: Extern) -> bool:
    """Whether the call's result depends, or may depend (a user's op), on the storage offset of an argument.

    `as_strided` and `as_strided_scatter` count from the first element of the storage; branches and loop bodies may
    contain calls of them. `support.offset_of` returns such an offset.
    """
    target = getattr(op.target, "copies_results_of", op.target)
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.HigherOrderOperator) or hasattr(target, "offset_of_result_of")
    counts = any(argument.name == "storage_offset" for argument in target._schema.arguments)
    return counts or target.namespace not in _NAMESPACES


def buffers_read(op: IROp) -> set[str]:
    """Return the names of all buffers whose contents the op reads."""
    if isinstance(op, Loops | Combo):
        parts = loops_of(op)
        return {load.buffer for part in parts for load in part.body.loads()}.union(*(part.before for part in parts))
    return {view.buffer for view in inputs_of(op)}


def buffers_written(op: IROp) -> list[str]:
    """Return the names that the op defines, including the new names of mutated buffers."""
    mutated = [view.buffer for view in op.mutates] if isinstance(op, Extern | Loops | Combo) else []
    return [view.buffer for view in op.outputs] + mutated


@dataclass(slots=True)
class LoweredGraph:
    """The ops of one FX graph, in order, with its inputs, buffers and outputs."""

    name: str
    inputs: tuple[str, ...]  # argument names in call order; views in `views`, or sympy expressions in `scalars`
    views: dict[str, View]  # every buffer's own full view, including inputs and constants
    scalars: dict[str, sympy.Expr]  # symbolic arguments
    constants: dict[str, Any]  # tensors and modules that are attributes of the graph
    aliases: dict[str, str]  # buffer -> the buffer whose memory it shares
    sources: dict[str, str]  # symbol known only at run time -> the buffer that holds its value
    ops: list[IROp]
    outputs: tuple[Any, ...]  # views, sympy expressions, None or Python values
    size_hints: dict[str, int]  # value of each symbol when the graph was traced
    computed: dict[str, sympy.Expr] = field(default_factory=dict)  # symbol of a computed size -> its value
    attention: list[str] = field(default_factory=list)  # the kernel chosen for each flex attention, and the reason
    order: dict[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # op -> ops that must run before it although it does not read their results

    def root(self, buffer: str) -> str:
        """Return the buffer that owns the memory."""
        while buffer in self.aliases:
            buffer = self.aliases[buffer]
        return buffer

    def hint(self, expr: sympy.Expr) -> int:
        """Return `expr` for the traced sizes; an unbacked size counts as 1, because its bytes are unknown."""
        if expr.is_Integer:
            return int(expr)
        known = {symbol: self.size_hints.get(str(symbol), 1) for symbol in expr.free_symbols}
        return int(expr.subs(known))

    def __str__(self) -> str:
        lines = [f"graph {self.name}({', '.join(self.inputs)})"]
        for op in self.ops:
            lines.append(describe(op))
            bodies = op.functions if isinstance(op, Attention) else [part.body for part in loops_of(op)]
            for body in bodies:
                lines.extend("    " + line for line in str(body).splitlines())
        return "\n".join(lines)


def describe(op: IROp) -> str:
    """Return a line for one op: `mm: extern aten.mm.default(primals_1, view) -> mm`."""
    outputs = ", ".join(buffers_written(op)) or "nothing"
    reads = ", ".join(sorted(buffers_read(op)))
    if isinstance(op, Attention):
        kind = "attention backward" if op.is_backward else "attention"
    elif isinstance(op, Loops | Combo):
        kind = "loops" if isinstance(op, Loops) else f"{len(op.parts)} loops"
    elif isinstance(op, Extern):
        kind = f"extern {op.target}"
    else:
        kind = f"start {op.call.target}" if isinstance(op, Start) else "wait"
    return f"{op.name}: {kind}({reads}) -> {outputs}"
