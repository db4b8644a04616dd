"""Attention over blocks of scores: fixed kernels with generated code for the score and mask functions.

Forward is one function, with a program per tile of queries of a head. Backward is three functions: sums of rows,
gradients of keys and values (a program per tile of keys), and gradients of queries (a program per tile of queries).

    for i in range(0, count * 2):                   # tiles of all blocks in this row of blocks
        k = block * 128 + i % 2 * 64 + tl.arange(0, 64)
        scores = ops.dot(queries, tl.trans(keys), ...)
        v0 = ...                                    # result of the score function
        scores = tl.where(v1, v0, float("-inf"))    # v1: result of the mask function; omitted in full blocks
        ...
        block = tl.load(blocks + (i + 1) // 2)      # loaded one step ahead

Exponentials are to base 2, as in hardware; torch's op also returns logsumexp and maximum to base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch

from overlapc.codegen.generators import KernelSource
from overlapc.codegen.triton.axes import Scope
from overlapc.codegen.triton.expressions import POINTER, converted
from overlapc.codegen.triton.functions import HEADER, function_text, named_source
from overlapc.codegen.triton.products import float32_precision
from overlapc.codegen.triton.shape import KernelShape
from overlapc.codegen.triton.tiling import Tiling, power_of_two
from overlapc.codegen.triton.values import ValueWriter
from overlapc.ir.body import Body, Load
from overlapc.ir.ops import GRADIENT, SCORE, Attention, View
from overlapc.runtime.triton_kernel import Stage, TritonLaunch

_LOG2E = math.log2(math.e)
_SMALLEST = 16  # tl.dot takes no smaller tile in any dim
_LARGEST_HEAD = 256  # elements of a head
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INT32_LIMIT = 2**31
_ROWS = 128  # rows in a tile of the first stage of backward


Step = Callable[[Scope, bool], None]  # (scope, whether the tile is in a full block): writes the code for one tile


@dataclass(frozen=True, slots=True)
class Tile:
    """Size of a tile of scores (queries by keys), number of warps, and number of pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


def stages_of(op: Attention) -> tuple[str, ...]:
    """Return the names of the functions whose tile sizes can be chosen."""
    return ("keys", "queries") if op.is_backward else ("forward",)


def choose(op: Attention) -> dict[str, Tile]:
    """Choose the tile of each function.

    For bfloat16 heads of 128 elements these are the fastest in a sweep on one H200 (benchmarks/flex_attention.py);
    other tiles are chosen to fit its registers (255 per thread) and shared memory (228 KiB).
    """
    wide = max(_padded(op.tensors[role].layout.size[3]) for role in ("query", "value"))
    if op.tensors["query"].dtype is torch.float32:
        by_keys, by_queries = (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)) if wide <= 128 else (Tile(16, 16, 4, 1),) * 2
        forward = Tile(64, 32, 4, 2) if wide <= 64 else Tile(32, 32, 4, 2)
    elif wide <= 128:
        by_keys, by_queries = Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)
        forward = Tile(128, 128, 8, 3) if wide <= 64 else Tile(64, 64, 4, 3)
    else:
        by_keys, by_queries = Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)
        forward = Tile(64, 64, 8, 2)
    tiles = {"keys": by_keys, "queries": by_queries} if op.is_backward else {"forward": forward}
    return {name: _fitted(tile, op) for name, tile in tiles.items()}


def _fitted(tile: Tile, op: Attention) -> Tile:
    """Shrink `tile` so that it divides the blocks and is no larger than the tensors need."""

    def fit(size: int, block: int, length: sympy.Expr) -> int:
        return min(size, block & -block, max(_SMALLEST, power_of_two(int(length))))

    queries = fit(tile.queries, op.blocks.query_size, op.tensors["query"].size[2])
    keys = fit(tile.keys, op.blocks.key_size, op.tensors["key"].size[2])
    return Tile(queries, keys, tile.warps, tile.stages)


def refuse(op: Attention) -> str | None:
    """Return why this attention is unsupported, or None. The caller checks the operations of its functions."""
    query, key, value = (op.tensors[role] for role in ("query", "key", "value"))
    if query.dtype not in _DTYPES:
        return f"attention of {query.dtype}"
    if max(query.size[3], value.size[3]) > _LARGEST_HEAD:
        return f"heads of {max(query.size[3], value.size[3])} elements"
    if int(query.size[1]) % int(key.size[1]):
        return "a number of query heads that is no multiple of the number of key heads"
    for size, length in ((op.blocks.query_size, query.size[2]), (op.blocks.key_size, key.size[2])):
        if size & -size < min(_SMALLEST, power_of_two(int(length))):
            return f"blocks of {size}"
    for kind, (counts, indices) in op.blocks.lists.items():
        along = query if "keys" in kind else key
        size = op.blocks.query_size if "keys" in kind else op.blocks.key_size
        if int(counts.size[-1]) * size < along.size[2]:
            return f"a mask of {counts.size[-1]} blocks, too few for {along.size[2]} positions"
        if {counts.dtype, indices.dtype} != {torch.int32}:
            return f"a mask whose lists have dtypes {counts.dtype} and {indices.dtype}"
    for view in (*op.tensors.values(), *op.results.values()):
        if int(view.size[2]) * max(map(int, view.layout.stride[2:])) + _LARGEST_HEAD >= _INT32_LIMIT:
            return "heads of more than 2^31 elements"
    if any(_shape_of(op, body, Tile(_SMALLEST, _SMALLEST, 4, 1)).index_dtype != "tl.int32" for body in op.functions):
        return "a tensor of more than 2^31 elements that its functions read"
    return None


def source(op: Attention, hint: str, comment: str, tiles: Mapping[str, Tile] | None = None) -> KernelSource:
    """Return the source of the kernel: its functions and their launch parameters. tiles: default of `choose`."""
    tiles = tiles or choose(op)
    heads, batch = int(op.tensors["query"].size[1]), int(op.tensors["query"].size[0])
    views: dict[str, View] = {**op.tensors, **list_arguments(op)}
    views.update({f"captured{at}": view for at, view in enumerate(op.captured)}, **op.results)
    scratch: tuple[tuple[torch.dtype, sympy.Expr], ...] = ()
    names = list(views)
    text, stages = f"# {_described(op, tiles)}\n{HEADER}", []
    if op.is_backward:
        names.append("row_sums")
        rows = batch * heads * int(op.tensors["query"].size[2])
        scratch = ((torch.float32, sympy.Integer(rows)),)
        stages.append(Stage(f"{hint}_rows", sympy.Integer(-(-rows // _ROWS)), 4))
        text += function_text(stages[-1].function, names, _Function(op, Tile(_ROWS, 1, 4, 0)).row_sums())
    for part in stages_of(op):
        function, tile = _Function(op, tiles[part]), tiles[part]
        lines = {"forward": function.forward, "keys": function.by_keys, "queries": function.by_queries}[part]()
        stages.append(Stage(f"{hint}_{part}", sympy.Integer(function.programs), tile.warps, tile.stages))
        text += function_text(stages[-1].function, names, lines)
    pointers = tuple(POINTER[view.dtype] for view in views.values())
    launch = TritonLaunch(tuple(stages), pointers, scratch, (), None)
    return named_source(hint, text, tuple(view.buffer for view in views.values()), (), comment, launch)


def _described(op: Attention, tiles: Mapping[str, Tile]) -> str:
    parts = (f"{part} {tile.queries} queries by {tile.keys} keys" for part, tile in tiles.items())
    return f"attention: {', '.join(parts)}"


def list_arguments(op: Attention) -> dict[str, View]:
    """Return the lists of blocks, by the names of the kernel's arguments."""
    return {
        f"{kind}_{what}": view
        for kind, pair in op.blocks.lists.items()
        for what, view in zip(("count", "list"), pair, strict=True)
    }


def _padded(size: sympy.Expr) -> int:
    return max(_SMALLEST, power_of_two(int(size)))


def _shape_of(op: Attention, body: Body, tile: Tile) -> KernelShape:
    """Return a score or mask function as a kernel over a tile of scores."""
    b, h, q, k = body.loops
    shape = KernelShape(body, Tiling("dot", (k,), tile.keys, tile.warps, y=(q,), yblock=tile.queries, grid=(b, h)), "f")
    shape.arguments = {view.buffer: f"captured{at}" for at, view in enumerate(op.captured)}
    return shape


def _index(numbers: Iterable[str], steps: Sequence[int]) -> str:
    """Return an index such as `b * 4096 + q`: the sum of numbers times their steps, plus the last of `steps`."""
    *steps, offset = steps
    terms = [number if step == 1 else f"{number} * {step}" for number, step in zip(numbers, steps, strict=True) if step]
    return " + ".join([*terms, *([str(offset)] if offset or not terms else [])])


class _Function:
    """Writes one function of a kernel."""

    def __init__(self, op: Attention, tile: Tile) -> None:
        self.op = op
        self.tile = tile
        self.lines: list[str] = []
        self.emit = Scope(self.lines, 1)
        query, key, value = (op.tensors[role] for role in ("query", "key", "value"))
        self.dtype = query.dtype
        self.batch, self.heads, self.queries, self.width = map(int, query.size)
        self.key_heads, self.keys = int(key.size[1]), int(key.size[2])
        self.group = self.heads // self.key_heads
        self.value_width = int(value.size[3])
        self.programs = 0
        self.by_key = False  # whether tiles are [keys, queries] instead of [queries, keys]
        self.written = 0  # number of score and mask functions so far, for unique names
        own = op.score is None and op.scale > 0
        self.factor = op.scale * _LOG2E if own else _LOG2E  # factor that turns `scores` into exponents to base 2
        self.scales = not own
        self.precision = f'"{float32_precision()}"'

    # --- functions

    def forward(self) -> list[str]:
        emit, rows = self.emit, self.tile.queries
        self._program("queries", rows)
        self._positions(emit, "q", f"tile * {rows}", rows, self.queries)
        for role in ("query", "key", "value"):
            self._head(emit, role)
        self._width_axes()
        emit(f"queries = {self._tile_of('query', 'q')}")
        emit(f'best = tl.full([{rows}], float("-inf"), tl.float32)')
        emit(f"total = tl.full([{rows}], 0.0, tl.float32)")
        emit(f"result = tl.full([{rows}, {_padded(self.op.tensors['value'].size[3])}], 0.0, tl.float32)")
        self._over_blocks(emit, "keys", "q_block", self._forward_step)
        emit("empty = total == 0.0")
        emit("result = result / tl.where(empty, 1.0, total)[:, None]")
        self._store(emit, "out", "q", "result")
        self._store_row(emit, "logsumexp", 'tl.where(empty, float("-inf"), best + tl.log2(total))')
        self._store_row(emit, "maximum", "best")
        return self.lines

    def _forward_step(self, emit: Scope, full: bool) -> None:
        emit(f"keys = {self._tile_of('key', 'k')}")
        self._scores(emit, "queries", "keys", full)
        emit(f"values = {self._tile_of('value', 'k')}")
        emit(f"highest = ops.maximum(best, ops.row_max(scores) * {self.factor!r})")
        emit('shift = tl.where(highest == float("-inf"), 0.0, highest)')
        emit(f"weights = ops.exp2_approximately(ops.fma(scores, {self.factor!r}, -shift[:, None]))")
        emit("decay = ops.exp2_approximately(best - shift)")
        emit("total = total * decay + ops.row_sum(weights)")
        emit("result = result * decay[:, None]")
        emit(f"result = ops.dot({self._low('weights')}, values, result, {self.precision})")
        emit("best = highest")

    def row_sums(self) -> list[str]:
        """Compute the term that is subtracted from each row of gradients of weights.

        It is the sum of `out * grad_out`, minus the gradient of logsumexp.
        """
        emit = self.emit
        rows = self.batch * self.heads * self.queries
        emit(f"row = tl.program_id(0) * {_ROWS} + tl.arange(0, {_ROWS})")
        emit(f"inside = row < {rows}")
        emit(f"q = row % {self.queries}")
        emit(f"h = row // {self.queries} % {self.heads}")
        emit(f"b = row // {self.queries * self.heads}")
        width = _padded(self.op.tensors["value"].size[3])
        emit(f"e = tl.arange(0, {width})")
        mask = "inside[:, None]" + (f" & (e < {self.value_width})[None, :]" if width != self.value_width else "")
        for role in ("out", "grad_out"):
            *steps, inner, offset = self._steps(role)
            rows_at = _index(("b.to(tl.int64)", "h.to(tl.int64)", "q.to(tl.int64)"), (*steps, offset))
            emit(f"{role}_at = ({rows_at})[:, None] + {_index(('e[None, :]',), (inner, 0))}")
            emit(f"{role}_tile = tl.load({role} + {role}_at, {mask}, other=0.0).to(tl.float32)")
        emit("sums = ops.row_sum(out_tile * grad_out_tile)")
        if "grad_logsumexp" in self.op.tensors:
            rows_at = _index("bhq", self._steps("grad_logsumexp"))
            emit(f"sums = sums - tl.load(grad_logsumexp + {rows_at}, inside, other=0.0) * {_LOG2E!r}")
        emit("tl.store(row_sums + row, sums, inside)")
        return self.lines

    def by_keys(self) -> list[str]:
        """Compute gradients of keys and values, summed over the queries of all heads that share them."""
        emit, columns = self.emit, self.tile.keys
        self.by_key = True
        self._program("keys", columns)
        self._positions(emit, "k", f"tile * {columns}", columns, self.keys)
        for role in ("key", "value"):
            self._head(emit, role)
        self._width_axes()
        emit(f"keys = {self._tile_of('key', 'k')}")
        emit(f"values = {self._tile_of('value', 'k')}")
        for role, view in (("grad_key", self.op.tensors["key"]), ("grad_value", self.op.tensors["value"])):
            emit(f"{role}_sum = tl.full([{columns}, {_padded(view.size[3])}], 0.0, tl.float32)")
        emit(f"for member in range(0, {self.group}):")
        inner = emit.inner()
        inner(f"h = key_head * {self.group} + member")
        for role in ("query", "grad_out"):
            self._head(inner, role)
        self._row_pointers(inner)
        self._over_blocks(inner, "queries", "k_block", self._key_step)
        emit(f"grad_key_sum = grad_key_sum * {self.op.scale!r}")
        self._store(emit, "grad_key", "k", "grad_key_sum")
        self._store(emit, "grad_value", "k", "grad_value_sum")
        return self.lines

    def _key_step(self, emit: Scope, full: bool) -> None:
        emit(f"queries = {self._tile_of('query', 'q')}")
        self._scores(emit, "keys", "queries", full)
        self._rows(emit)
        emit(f"weights = ops.exp2_approximately(ops.fma(scores, {self.factor!r}, -logsumexps[None, :]))")
        emit(f"gradients = {self._tile_of('grad_out', 'q')}")
        emit(f"grad_value_sum = ops.dot({self._low('weights')}, gradients, grad_value_sum, {self.precision})")
        zeros = f"tl.full([{self.tile.keys}, {self.tile.queries}], 0.0, tl.float32)"
        emit(f"changes = ops.dot(values, tl.trans(gradients), {zeros}, {self.precision})")
        emit("changes = weights * (changes - sums[None, :])")
        self._changes(emit, full)
        emit(f"grad_key_sum = ops.dot({self._low('changes')}, queries, grad_key_sum, {self.precision})")

    def by_queries(self) -> list[str]:
        emit, rows = self.emit, self.tile.queries
        self._program("queries", rows)
        self._positions(emit, "q", f"tile * {rows}", rows, self.queries)
        for role in ("query", "key", "value", "grad_out"):
            self._head(emit, role)
        self._width_axes()
        emit(f"queries = {self._tile_of('query', 'q')}")
        emit(f"gradients = {self._tile_of('grad_out', 'q')}")
        self._row_pointers(emit)
        self._rows(emit)
        emit(f"grad_query_sum = tl.full([{rows}, {_padded(self.op.tensors['query'].size[3])}], 0.0, tl.float32)")
        self._over_blocks(emit, "keys", "q_block", self._query_step)
        emit(f"grad_query_sum = grad_query_sum * {self.op.scale!r}")
        self._store(emit, "grad_query", "q", "grad_query_sum")
        return self.lines

    def _query_step(self, emit: Scope, full: bool) -> None:
        emit(f"keys = {self._tile_of('key', 'k')}")
        self._scores(emit, "queries", "keys", full)
        emit(f"weights = ops.exp2_approximately(ops.fma(scores, {self.factor!r}, -logsumexps[:, None]))")
        emit(f"values = {self._tile_of('value', 'k')}")
        zeros = f"tl.full([{self.tile.queries}, {self.tile.keys}], 0.0, tl.float32)"
        emit(f"changes = ops.dot(gradients, tl.trans(values), {zeros}, {self.precision})")
        emit("changes = weights * (changes - sums[:, None])")
        self._changes(emit, full)
        emit(f"grad_query_sum = ops.dot({self._low('changes')}, keys, grad_query_sum, {self.precision})")

    # --- the tile of a program, and positions in memory

    def _program(self, over: str, size: int) -> None:
        """Define the tile, head and batch of this program; the first programs get the longest rows of a causal mask."""
        length, heads = (self.queries, self.heads) if over == "queries" else (self.keys, self.key_heads)
        tiles = -(-length // size)
        self.programs = tiles * heads * self.batch
        emit = self.emit
        emit("program = tl.program_id(0)")
        emit(f"tile = {tiles - 1} - program % {tiles}" if over == "queries" else f"tile = program % {tiles}")
        name = "h" if over == "queries" else "key_head"
        emit(f"{name} = program // {tiles} % {heads}")
        emit(f"b = program // {tiles * heads}")
        if over == "queries":
            emit(f"key_head = h // {self.group}")
            emit(f"q_block = tile * {size} // {self.op.blocks.query_size}")
        else:
            emit(f"k_block = tile * {size} // {self.op.blocks.key_size}")

    def _positions(self, emit: Scope, name: str, first: str, size: int, length: int) -> None:
        emit(f"{name} = {first} + tl.arange(0, {size})")
        if not self._is_even(name):
            emit(f"{name}_inside = {name} < {length}")
            emit(f"{name}_clamped = tl.minimum({name}, {length - 1})")

    def _is_even(self, name: str) -> bool:
        """Whether no tile along q or k extends past the last position, for any block."""
        length, size, block = (
            (self.queries, self.tile.queries, self.op.blocks.query_size)
            if name == "q"
            else (self.keys, self.tile.keys, self.op.blocks.key_size)
        )
        return length % size == 0 and (length % block == 0 or block > length)

    def _steps(self, role: str) -> tuple[int, ...]:
        """Return the strides and the offset of a tensor."""
        view = self.op.tensors.get(role) or self.op.results[role]
        return (*map(int, view.layout.stride), int(view.layout.offset))

    def _head(self, emit: Scope, role: str) -> None:
        """Define the pointer to the matrix of this program's head in a tensor."""
        batch, head, *_, offset = self._steps(role)
        number = "key_head" if role in ("key", "value", "grad_key", "grad_value") else "h"
        begin = _index(("b.to(tl.int64)", f"{number}.to(tl.int64)"), (batch, head, offset))
        emit(f"{role}_at = {role} + {begin}")

    def _width_axes(self) -> None:
        self.emit(f"d = tl.arange(0, {_padded(self.op.tensors['query'].size[3])})")
        self.emit(f"e = tl.arange(0, {_padded(self.op.tensors['value'].size[3])})")

    def _element(self, role: str, row: str) -> tuple[str, str]:
        """Return (pointers to a tile of a tensor, the condition that they are in bounds, or "" if they always are)."""
        *_, step, inner, _ = self._steps(role)
        wide, width = (
            ("d", self.width) if role in ("query", "key", "grad_query", "grad_key") else ("e", self.value_width)
        )
        inside = [] if self._is_even(row) else [f"{row}_inside[:, None]"]
        inside += [] if width == max(_SMALLEST, power_of_two(width)) else [f"({wide} < {width})[None, :]"]
        index = _index((f"{row}[:, None]", f"{wide}[None, :]"), (step, inner, 0))
        return f"{role}_at + {index}", " & ".join(inside)

    def _tile_of(self, role: str, row: str) -> str:
        pointers, inside = self._element(role, row)
        return f"tl.load({pointers}, {inside}, other=0.0)" if inside else f"tl.load({pointers})"

    def _store(self, emit: Scope, role: str, row: str, value: str) -> None:
        self._head(emit, role)
        pointers, inside = self._element(role, row)
        text = converted(value, torch.float32, self.op.results[role].dtype)
        emit(f"tl.store({pointers}, {text}{', ' + inside if inside else ''})")

    def _store_row(self, emit: Scope, role: str, value: str) -> None:
        mask = "" if self._is_even("q") else ", q_inside"
        emit(f"tl.store({role} + {_index(('b.to(tl.int64)', 'h', 'q'), self._steps(role))}, {value}{mask})")

    def _row_pointers(self, emit: Scope) -> None:
        """Define the pointers to the logsumexp and the row sums of this program's head."""
        batch, head, _, offset = self._steps("logsumexp")
        emit(f"logsumexp_at = logsumexp + {_index(('b.to(tl.int64)', 'h'), (batch, head, offset))}")
        emit(f"sums_at = row_sums + (b * {self.heads} + h).to(tl.int64) * {self.queries}")

    def _rows(self, emit: Scope) -> None:
        """Load logsumexp and sum of each row of this tile; rows without scores and rows out of bounds get weight 0."""
        mask = "" if self._is_even("q") else ', q_inside, other=float("-inf")'
        emit(f"logsumexps = tl.load(logsumexp_at + {_index('q', (self._steps('logsumexp')[2], 0))}{mask})")
        emit('logsumexps = tl.where(logsumexps == float("-inf"), float("inf"), logsumexps)')
        emit(f"sums = tl.load(sums_at + q{'' if self._is_even('q') else ', q_inside, other=0.0'})")

    # --- blocks and scores

    def _over_blocks(self, emit: Scope, kind: str, block: str, step: Step) -> None:
        """Write the loops over a row's tiles: those of blocks that need the mask function, then of full blocks."""
        for full in (False, True):
            name = f"full_{kind}" if full else kind
            if name in self.op.blocks.lists:
                self._over_list(emit, name, block, step, full)

    def _over_list(self, emit: Scope, name: str, block: str, step: Step, full: bool) -> None:
        over_keys = name.endswith("keys")
        size, length, block_size, position = (
            (self.tile.keys, self.keys, self.op.blocks.key_size, "k")
            if over_keys
            else (self.tile.queries, self.queries, self.op.blocks.query_size, "q")
        )
        counts, indices = self.op.blocks.lists[name]
        tiles = -(-min(block_size, length) // size)
        emit(f"count = tl.load({name}_count + {self._list_index(counts, block)})")
        emit(f"blocks = {name}_list + {self._list_index(indices, block)}")
        emit("block = tl.load(blocks)")
        last, stride = int(indices.size[-1]) - 1, int(indices.layout.stride[-1])
        emit(f"for i in range(0, count * {tiles}):")
        inner = emit.inner()
        first = f"block * {block_size} + i % {tiles} * {size}" if tiles > 1 else f"block * {block_size}"
        self._positions(inner, position, first, size, length)
        step(inner, full)
        following = f"(i + 1) // {tiles}" if tiles > 1 else "i + 1"
        inner(f"block = tl.load(blocks + {_index((f'tl.minimum({following}, {last})',), (stride, 0))})")

    def _list_index(self, view: View, block: str) -> str:
        """Return the index in a list at which the entries for this program's row of blocks begin."""
        sizes, strides = view.size[:3], view.layout.stride[:3]
        steps = [0 if size == 1 else int(step) for size, step in zip(sizes, strides, strict=True)]
        return _index(("b", "h", block), (*steps, int(view.layout.offset)))

    def _scores(self, emit: Scope, left: str, right: str, full: bool) -> None:
        """Compute the scores of a tile, with the score function applied, and -inf where the mask excludes them."""
        shape = (self.tile.keys, self.tile.queries) if self.by_key else (self.tile.queries, self.tile.keys)
        zeros = f"tl.full({list(shape)}, 0.0, tl.float32)"
        emit(f"raw = ops.dot({left}, tl.trans({right}), {zeros}, {self.precision})")
        if self.scales:
            emit(f"raw = raw * {self.op.scale!r}")
        emit(f"scores = {'raw' if self.op.score is None else self._value(emit, self.op.score, {SCORE: 'raw'})}")
        counted = [] if full or self.op.mask is None else [self._value(emit, self.op.mask, {})]
        if not self._is_even("k"):
            counted.append(f"k_inside{'[:, None]' if self.by_key else '[None, :]'}")
        if counted:
            emit(f"counts = {' & '.join(counted)}")
            emit('scores = tl.where(counts, scores, float("-inf"))')

    def _changes(self, emit: Scope, full: bool) -> None:
        """Turn gradients of the score function's results into gradients of raw scores."""
        if self.op.gradient is None:
            return
        emit(f"changes = {self._value(emit, self.op.gradient, {SCORE: 'raw', GRADIENT: 'changes'})}")
        uneven = [name for name in ("q", "k") if not self._is_even(name)]
        sides = {"q": "[None, :]", "k": "[:, None]"} if self.by_key else {"q": "[:, None]", "k": "[None, :]"}
        counted = [f"{name}_inside{sides[name]}" for name in uneven]
        counted += [] if full or self.op.mask is None else ["counts"]
        if counted:  # the derivative may be NaN where scores are excluded
            emit(f"changes = tl.where({' & '.join(counted)}, changes, 0.0)")

    def _value(self, emit: Scope, body: Body, given: Mapping[Load, str]) -> str:
        """Write the statements of a score or mask function for this tile; return the name of its result."""
        writer = ValueWriter(_shape_of(self.op, body, self.tile))
        sides = ("[None, :]", "[:, None]") if self.by_key else ("[:, None]", "[None, :]")
        b, h, q, k = (loop.symbol for loop in body.loops)
        names = {b: "b", h: "h"}
        for symbol, name, side in ((q, "q", sides[0]), (k, "k", sides[1])):
            names[symbol] = f"{name}_tile"
            emit(f"{name}_tile = {name if self._is_even(name) else f'{name}_clamped'}{side}")
        writer.symbols = dict(names)
        writer.names = dict(given.items())
        writer.value_axes = dict.fromkeys(given, frozenset({"y", "x"}))
        self.written += 1
        number = self.written
        counter = iter(range(1 << 20))
        writer.fresh = lambda: f"f{number}_{next(counter)}"  # type: ignore[method-assign]
        (store,) = body.stores
        writer.compute(emit, writer.names, [store.value])
        return writer.names[store.value]

    def _low(self, name: str) -> str:
        return converted(name, torch.float32, self.dtype)
