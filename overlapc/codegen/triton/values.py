"""Writes values of a body as Triton statements: loads, operations and stores over the tile of a program."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import sympy
import torch

from overlapc.codegen.triton.accumulate import Scanning
from overlapc.codegen.triton.axes import FIRST, AxisWriter, Scope
from overlapc.codegen.triton.expressions import (
    COMPUTE,
    as_literal,
    constant_text,
    converted,
    converted_name,
    operation,
)
from overlapc.codegen.triton.pairs import Pair
from overlapc.codegen.triton.shape import KernelShape, axis_symbol, term
from overlapc.ir.body import Cast, Checked, Constant, Index, Load, Op, Reduce, Scan, Store, Value
from overlapc.ir.conversions import constant
from overlapc.ir.indexing import exact_quotient

_ORIGIN_CHARACTERS = 300  # most characters about the origin in a check's message
_PAIR = sympy.Symbol("pair", integer=True, nonnegative=True)  # the index variable of tiles of pairs
_ORDER = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class ValueWriter(AxisWriter):
    """Writes statements that compute values; `names` has the variables of values computed in the function's scope."""

    def __init__(self, kernel: KernelShape) -> None:
        super().__init__(kernel)
        self.names: dict[Value, str] = {}
        self.value_axes: dict[Value, frozenset[str]] = {}
        self.count = 0
        self.zero_outside = False  # whether elements outside of a tile must read as 0
        self.rereads = False  # whether a later pass reads the same elements again

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def needed(self, roots: Iterable[Value], names: Mapping[Value, str]) -> list[Value]:
        """Return the values that `roots` need and that have no name yet, operands first. Reductions must have names."""
        order: list[Value] = []
        done: set[Value] = set(names)
        stack = [(root, False) for root in reversed(list(roots))]
        while stack:
            value, expanded = stack.pop()
            if expanded:
                order.append(value)
                continue
            if value in done:
                continue
            assert not isinstance(value, Reduce), f"{value.kind} is used before it is reduced"
            done.add(value)
            stack.append((value, True))
            stack.extend((operand, False) for operand in reversed(value.operands()) if operand not in done)
        return order

    def compute_outer(self, roots: Sequence[Value]) -> None:
        """Compute the values that do not vary with r, before the loop over r."""
        varies: dict[Value, bool] = {}
        outer = []
        for value in self.needed(roots, self.names):
            varies[value] = any(varies.get(operand, False) for operand in value.operands()) or any(
                not self.kernel.reduced.isdisjoint(expr.free_symbols) for expr in value.indices()
            )
            if not varies[value] and not isinstance(value, Constant):
                outer.append(value)
        self.compute(self.top, self.names, outer)

    def compute(self, emit: Scope, names: dict[Value, str], roots: Sequence[Value]) -> None:
        """Write statements for all values that `roots` need and that have no name yet."""
        checks = [value for value in self.needed(roots, names) if isinstance(value, Checked)]
        # Threads synchronize at each check, so the operands of all checks are loaded before the first one.
        asked = [operand for check in checks for operand in check.operands()]
        order = self.needed([*asked, *checks, *roots], names)
        literal_only = self.literals(order) - set(roots)
        wanted = set(order)
        for value in order:
            if value in names:
                continue  # the second of a pair
            self.value_axes[value] = self.axes_of(value)
            pair = self.kernel.load_pairs.get(value) if isinstance(value, Load) else None
            if pair is not None and wanted >= {pair.even, pair.odd} and not self.broadcasts(pair.even):
                self.load_pair(emit, names, pair)
            elif isinstance(value, Scan):
                names[value] = self.scanned(emit, names, self.kernel.scans[value])
            elif value not in literal_only:
                if isinstance(value, Checked):
                    mask = self.mask_argument(self.value_axes[value]).removeprefix(", ") or "None"
                    message = self.assertion(value.message)
                    emit(f"tl.device_assert({names[value.condition]}, {message}, mask={mask})")
                name = self.fresh()
                emit(f"{name} = {self.text(value, names)}")
                names[value] = name

    def assertion(self, message: str) -> str:
        """Return the literal that a failed check prints: the message, then the nodes and the user's line."""
        origin = " | ".join(" ".join(line.split()) for line in self.kernel.origin.splitlines())[:_ORIGIN_CHARACTERS]
        return ascii(f"{message}, in {origin}" if origin else message)

    def scanned(self, emit: Scope, names: Mapping[Value, str], scanning: Scanning) -> str:
        """Write statements that scan this tile and continue the scan of earlier tiles; return the result's name."""
        scan, states = scanning.scan, scanning.states
        elements = [self.tile(emit, names, scan.arg, states[0].dtype)]
        if len(states) > 1:
            elements.append(self.position())
        results = [self.fresh() for _ in states]
        emit(f"{', '.join(results)} = {scanning.tile(elements)}")
        if self.kernel.tiling.form != "persistent":
            emit(f"{', '.join(results)} = {scanning.joined(results)}")
            for state, result in zip(states, results, strict=True):
                emit(f"{state.name} = ops.last({result})")
        result, computed = results[-1], states[-1].dtype
        if computed is scan.dtype:
            return result
        name = self.fresh()
        emit(f"{name} = {converted(result, computed, scan.dtype)}")
        return name

    def tile(self, emit: Scope, names: Mapping[Value, str], arg: Value, dtype: torch.dtype) -> str:
        """Return the name of `arg` as a full tile of `dtype`."""
        text = converted_name(names[arg], arg.dtype, dtype)
        if self.value_axes[arg] != {"x", "r"}:
            text = f"tl.broadcast_to({text}, {self.kernel.shape(('x', 'r'))})"
        if not text.isidentifier():
            name = self.fresh()
            emit(f"{name} = {text}")
            return name
        return text

    def position(self) -> str:
        """Return the position in the reduction space as a full tile."""
        return f"tl.broadcast_to({self.kernel.index_name['r']}, {self.kernel.shape(('x', 'r'))})"

    def literals(self, order: Sequence[Value]) -> set[Value]:
        """Return the constants and positions that every user writes inline: literals, indices that are compared."""
        wanted: set[Value] = {value for value in order if isinstance(value, Constant | Index)}
        for value in order:
            for position, operand in enumerate(value.operands()):
                in_place = isinstance(value, Op) and (self.compares_positions(value) or as_literal(value, position))
                if operand in wanted and not in_place:
                    wanted.discard(operand)
        used = {operand for value in order for operand in value.operands()}
        return wanted & used

    def axes_of(self, value: Value) -> frozenset[str]:
        if isinstance(value, Scan):
            return frozenset({"x", "r"})
        axes: set[str] = set()
        for operand in value.operands():
            axes |= self.value_axes[operand]
        for expr in value.indices():
            axes |= self.index_axes(expr)
        return frozenset(axes)

    def address_axes(self, load: Load) -> frozenset[str]:
        """Return the axes with which the address varies, regardless of the mask."""
        return frozenset(self._addressed(load.index, load.indirect))

    def _addressed(self, index: sympy.Expr, indirect: Sequence[tuple[sympy.Symbol, Value]]) -> set[str]:
        """Return the axes of an index. An indirect value for a dim of size 1 does not occur in the index."""
        used = (value for symbol, value in indirect if symbol in index.free_symbols)
        return self.index_axes(index).union(*(self.value_axes[value] for value in used))

    def index_axes(self, expr: sympy.Expr) -> set[str]:
        return {self.kernel.axis_of[symbol] for symbol in expr.free_symbols if symbol in self.kernel.axis_of}

    def text(self, value: Value, names: Mapping[Value, str]) -> str:
        if isinstance(value, Load):
            return self.load(value, names)
        if isinstance(value, Constant):
            return constant_text(value)
        if isinstance(value, Index):
            return self.index_value(value)
        if isinstance(value, Cast):
            if value.to is torch.bfloat16 and value.arg.dtype is torch.float32:
                return f"ops.{'round' if self.fills_threads(value) else 'through'}_bf16({names[value.arg]})"
            text = converted(names[value.arg], value.arg.dtype, value.to)
            return text if value.to is value.dtype else f"{text}.to({COMPUTE[value.dtype]})"
        if isinstance(value, Checked):
            return names[value.arg]
        assert isinstance(value, Op)
        first = self.first_number(value) if value.name == "random" else None
        if first is not None:
            return f"ops.random_block({names[value.args[0]]}, {names[value.args[1]]}, {first}, XBLOCK)"
        if self.compares_positions(value):
            left, right = (self.position_text(arg) for arg in value.args)
            return f"{term(left)} {_ORDER[value.name]} {term(right)}"
        args = [names[arg] if arg in names else as_literal(value, at) for at, arg in enumerate(value.args)]
        return operation(value, [arg for arg in args if arg is not None])

    def first_number(self, value: Op) -> str | None:
        """Return the position of the tile's first random number if the tile draws contiguous ones, else None.

        One evaluation of Philox yields four contiguous numbers.
        """
        kernel, position = self.kernel, value.args[2]
        loops = kernel.axes["x"]
        if kernel.tile_axes != ("x",) or kernel.block["x"] % 4 or not isinstance(position, Index) or not loops:
            return None
        along = loops[0].symbol if len(loops) == 1 else axis_symbol("x")
        start = sympy.expand(self.flattened(position.expr) - along)
        terms = sympy.Add.make_args(start)
        fixed = start.free_symbols.isdisjoint({along, *(loop.symbol for loop in loops)})
        if not fixed or any(term != 0 and exact_quotient(term, sympy.Integer(4)) is None for term in terms):
            return None
        return kernel.printer({**self.symbols, along: FIRST})(start + along)

    def fills_threads(self, value: Value) -> bool:
        """Whether every thread holds at least two elements of a value."""
        kernel = self.kernel
        elements = math.prod(kernel.block[axis] for axis in kernel.tile_axes)
        return self.value_axes[value] == set(kernel.tile_axes) and elements >= 64 * kernel.tiling.num_warps

    def compares_positions(self, value: Op) -> bool:
        """Whether only indices and small numbers are compared, so that the comparison can use the index dtype."""
        return value.name in _ORDER and all(
            (isinstance(arg, Index) and arg.dtype is torch.int64)
            or (isinstance(arg, Constant) and arg.dtype is torch.int64 and abs(int(arg.number)) < 2**30)
            for arg in value.args
        )

    def position_text(self, value: Value) -> str:
        if isinstance(value, Constant):
            return str(int(value.number))
        assert isinstance(value, Index)
        return self.index(value.expr, (), {})

    def index_value(self, value: Index) -> str:
        if value.expr.is_Integer:
            return constant_text(constant(int(value.expr), value.dtype))
        text = self.index(value.expr, (), {})
        if value.dtype is torch.bool:
            return f"({text}) != 0"
        return f"{term(text)}.to({COMPUTE[value.dtype]})"

    def index(
        self, expr: sympy.Expr, indirect: Sequence[tuple[sympy.Symbol, Value]], names: Mapping[Value, str]
    ) -> str:
        bound = {symbol: converted_name(names[value], value.dtype, torch.int64) for symbol, value in indirect}
        axes = {axis_symbol(axis): name for axis, name in self.kernel.index_name.items()}
        return self.kernel.printer({**axes, **self.symbols, **bound})(self.flattened(expr))

    def load_pair(self, emit: Scope, names: dict[Value, str], pair: Pair[Load]) -> None:
        """Write both loads of a pair as one access."""
        axes = self.axes_of(pair.even)
        mask = self.mask_argument(axes, pairs_along=pair.axis)
        both = f"tl.load({self.pair_pointer(pair)}{mask}{self.eviction(pair.even)})"
        for load in (pair.even, pair.odd):
            names[load] = self.fresh()
            self.value_axes[load] = axes
        results = f"{names[pair.even]}, {names[pair.odd]}"
        emit(f"{results} = ops.deinterleave({both}, {self.kernel.tile_axes.index(pair.axis)})")
        for load in (pair.even, pair.odd):
            text = self.as_computed(load, names[load])
            if text != names[load]:
                emit(f"{names[load]} = {text}")

    def store_pair(self, emit: Scope, names: Mapping[Value, str], pair: Pair[Store], axes: Sequence[str]) -> None:
        """Write both stores of a pair as one access."""
        values = []
        for store in (pair.even, pair.odd):
            text = self.stored(store, names)
            full = self.value_axes[store.value] == set(axes)
            values.append(text if full else f"tl.broadcast_to({text}, {self.kernel.shape(axes)})")
        both = f"ops.interleave({', '.join(values)}, {self.kernel.tile_axes.index(pair.axis)})"
        emit(f"tl.store({self.pair_pointer(pair)}, {both}{self.mask_argument(axes, pairs_along=pair.axis)})")

    def pair_pointer(self, pair: Pair[Load] | Pair[Store]) -> str:
        """Return pointers to a tile of twice the length along the pair's axis: even and odd elements alternate."""
        kernel, axis = self.kernel, pair.axis
        name, loops = kernel.pair_name(axis), kernel.axes[axis]
        expr = self.flattened(pair.even.index)
        flat = axis_symbol(axis)
        along = flat if expr.coeff(flat) == 2 else loops[-1].symbol
        names = {axis_symbol(other): text for other, text in kernel.index_name.items()} | self.symbols
        names[flat] = f"({name} // 2)"
        step = sympy.S.One
        for loop in reversed(loops):
            position = name if step == 1 else f"{name} // {kernel.size_text(2 * step)}"
            if loop is loops[-1]:
                size = 2 * loop.size
                inner = name if along is flat or len(loops) == 1 else f"({name} % {kernel.size_text(size)})"
            else:
                whole = loop is loops[0]
                names[loop.symbol] = f"({position})" if whole else f"(({position}) % {kernel.size_text(loop.size)})"
            step = sympy.expand(step * loop.size)
        text = kernel.printer({**names, _PAIR: inner})(sympy.expand(expr - 2 * along + _PAIR))
        return f"{kernel.arguments[pair.even.buffer]} + {term(text)}"

    def broadcasts(self, load: Load) -> bool:
        """Whether to broadcast a load's addresses to the whole tile: a narrower load would get another layout."""
        kernel = self.kernel
        return kernel.tiling.form == "persistent" and kernel.block["x"] > 1 and self.axes_of(load) == {"r"}

    def load(self, load: Load, names: Mapping[Value, str]) -> str:
        return self.as_computed(load, self.raw(load, names))

    def as_computed(self, load: Load, text: str) -> str:
        """Convert elements from their memory dtype to the dtype that the kernel computes in."""
        if load.memory_dtype is torch.bool:
            return f"{text} != 0"
        return converted_name(text, load.memory_dtype, load.dtype)

    def raw(self, load: Load, names: Mapping[Value, str]) -> str:
        """Return the expression that loads elements in their memory dtype."""
        index = self.index(load.index, load.indirect, names)
        axes = self.axes_of(load)
        if not axes <= self.address_axes(load):
            # One address for many elements: Triton needs addresses of the mask's shape.
            index = f"{term(index)} + tl.full({self.kernel.shape(axes)}, 0, tl.int32)"
        if self.broadcasts(load):  # changing a layout goes through shared memory
            index = f"{index} + tl.full({self.kernel.shape(('x', 'r'))}, 0, tl.int32)"
        pointer = f"{self.kernel.arguments[load.buffer]} + {term(index)}"
        arguments = self.mask_argument(axes, None if load.mask is None else names[load.mask])
        if self.kernel.is_one_a_lane(load):
            doublings = self.kernel.lane_width.bit_length() - 1
            return f"ops.load_by_lane{'_where' if arguments else ''}({pointer}{arguments}, {doublings})"
        seen = load.mask is not None and load not in self.kernel.unseen
        if seen or (arguments and self.zero_outside):
            arguments += ", other=0.0" if load.memory_dtype.is_floating_point else ", other=0"
        arguments += self.eviction(load)
        return f"tl.load({pointer}{arguments})"

    def eviction(self, load: Load) -> str:
        """Return the eviction policy argument of a load in a loop over r: elements that are read again stay cached."""
        axes = self.axes_of(load)
        if self.kernel.tiling.form not in ("looped", "split") or "r" not in axes or load.indirect:
            return ""
        again = self.rereads or ("x" not in axes and self.kernel.numel["x"] != 1)
        return f', eviction_policy="evict_{"last" if again else "first"}"'

    def write(self, emit: Scope, names: dict[Value, str], stores: Sequence[Store], axes: Sequence[str]) -> None:
        """Compute and write `stores`; all loads come first, so that an output may overwrite an input in place."""
        values = [value for store in stores for value in store.operands()]
        self.compute(emit, names, self.before_stores(names, stores, axes, values))
        for store in stores:
            pair = self.kernel.store_pairs.get(store)
            together = [store] if pair is None else [pair.even, pair.odd]
            self.compute_all(emit, names, together)
            index = self.index(store.index, store.indirect, names)
            covers = self._addressed(store.index, store.indirect) == set(axes)
            if pair is not None and covers:
                if store is pair.even:
                    self.store_pair(emit, names, pair, axes)
                continue
            if not covers:
                shape = self.kernel.shape(axes)
                index = f"{index} + tl.full({shape}, 0, tl.int32)"
            pointer = f"{self.kernel.arguments[store.buffer]} + {term(index)}"
            text = self.stored(store, names)
            mask = self.mask_argument(axes, None if store.mask is None else names[store.mask])
            if store.is_atomic:
                emit(f'tl.atomic_{store.mode}({pointer}, {text}{mask}, sem="relaxed")')
            else:
                emit(f"tl.store({pointer}, {text}{mask})")

    def before_stores(
        self, names: dict[Value, str], stores: Sequence[Store], axes: Sequence[str], values: Sequence[Value]
    ) -> Sequence[Value]:
        """Return what of `values` is computed before the first of `stores`: all of it, or only what they load.

        Triton 3.6 reuses conversions to a store's layout in places before them (its issue 8257: "operand #0 does not
        dominate this use"). So where layouts differ each store follows its value immediately: where stores are of rows'
        results, or of elements of different sizes.
        """
        rows = self.kernel.is_reduction and tuple(axes) == ("x",)
        if rows or len({store.memory_dtype.itemsize for store in stores}) > 1:
            return [value for value in self.needed(values, names) if isinstance(value, Load)]
        return values

    def compute_all(self, emit: Scope, names: dict[Value, str], stores: Sequence[Store]) -> None:
        self.compute(emit, names, [value for store in stores for value in store.operands()])

    def stored(self, store: Store, names: Mapping[Value, str]) -> str:
        value = store.value
        if store.memory_dtype is torch.bool:
            text = names[value] if value.dtype is torch.bool else f"({names[value]} != 0)"
            return f"{text}.to(tl.uint8)"
        return converted(names[value], value.dtype, store.memory_dtype)
