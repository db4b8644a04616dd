"""Writes values of a loop body as C++: expressions over names, loads, definitions and stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sympy
import torch

from overlapc.codegen.cpp.expressions import (
    C_TYPE,
    FORMAT,
    MEMORY_TYPE,
    cast_text,
    constant_text,
    index_text,
    load_text,
    operation_text,
    store_text,
)
from overlapc.codegen.cpp.transposes import Tiles
from overlapc.codegen.cpp.writer import Writer
from overlapc.ir.body import Body, Cast, Checked, Constant, Index, Load, Op, Store, Value
from overlapc.ir.settle import whole_number


class ValueWriter(Writer):
    """Appends values and stores of `body` to its lines; parameters `known` map values to names in earlier lines."""

    def __init__(self, body: Body, arguments: Mapping[str, str]) -> None:
        """arguments: names of the function's parameters, by buffer."""
        super().__init__()
        self.body = body
        self.arguments = arguments
        self.values = body.values()
        self.checks = body.checks()
        self.always_in_bounds = frozenset(load for load in body.loads() if _checks_guard(load))
        self.number = {value: at for at, value in enumerate(self.values)}
        self.tiles: Tiles | None = None
        self.bits: dict[str, str] = {}  # name of a number -> name of the bits that it was converted from
        self.facts: Mapping[Value, bool] = {}  # conditions that are constant in the loop being written
        self.memory_dtype: dict[str, torch.dtype] = {}
        accesses: list[Load | Store] = [*body.stores, *body.loads()]
        for access in accesses:
            self.memory_dtype.setdefault(access.buffer, access.memory_dtype)

    def parameter_type(self, buffer: str) -> str:
        """Return the type of a buffer's parameter: `float*`, or `const float*` if the buffer is only read."""
        stored = any(store.buffer == buffer for store in self.body.stores)
        return f"{'' if stored else 'const '}{MEMORY_TYPE[self.memory_dtype[buffer]]}*"

    def statement(self, value: Value, known: Mapping[Value, str]) -> str:
        """Return the C++ expression of one value, which is no load, over the names of its operands."""
        if isinstance(value, Index):
            return f"{C_TYPE[value.dtype]}({index_text(value.expr)})"
        if isinstance(value, Cast):
            return cast_text(known[value.arg], value.arg.dtype, value.to)
        if isinstance(value, Checked):
            number = self.checks.index(value.message) + 1
            arg, zero = known[value.arg], constant_text(0, value.dtype)
            return f"{known[value.condition]} ? {arg} : (failed = {number}, {zero})"  # 0 is an index in bounds
        assert isinstance(value, Op), f"{type(value).__name__} is not computed in place"
        if value.name == "where" and value.args[0] in self.facts:
            return known[self.operands_of(value)[0]]
        return operation_text(value, [known[arg] for arg in value.args])

    def element(self, load: Load, known: Mapping[Value, str]) -> str:
        """Return the expression of a loaded element: a number, or its bits for a format without arithmetic."""
        raw = load.memory_dtype in FORMAT
        zero = f"{MEMORY_TYPE[load.memory_dtype]}(0)" if raw else constant_text(0, load.dtype)
        if load.mask is not None and self.facts.get(load.mask) is False:
            return zero
        text = self.place(load, known) if raw else load_text(self.place(load, known), load.memory_dtype)
        if load.mask is None or load.mask in self.facts or load in self.always_in_bounds:
            return text
        return f"{known[load.mask]} ? {text} : {zero}"

    def place(self, access: Load | Store, known: Mapping[Value, str]) -> str:
        """Return the element that is loaded or stored: `in0[4096 * p0 + r0]`."""
        if isinstance(access, Load) and self.tiles is not None and access in self.tiles.names:
            return self.tiles.place(access)
        index = access.index
        if access.indirect:
            names = {}
            for symbol, value in access.indirect:
                name = known[value] if value.dtype == torch.int64 else f"int64_t({known[value]})"
                if _counts_a_condition(value):
                    # GCC 12 uses a vectorized condition as a number: it gathers from -1 instead of 1 if the index is a
                    # multiple of the condition plus a constant. A bitwise or (here with 0) prevents that.
                    name = f"({name} | threads >> 63)"
                names[symbol] = sympy.Symbol(name, integer=True)
            index = index.xreplace(names)
        argument = self.arguments[access.buffer]
        kind = MEMORY_TYPE[access.memory_dtype]
        if kind != MEMORY_TYPE[self.memory_dtype[access.buffer]]:
            argument = f"(({kind}*){argument})"  # a view of another dtype
        return f"{argument}[{index_text(index)}]"

    def store(self, store: Store, known: Mapping[Value, str]) -> str:
        """Return the statement that stores a known value."""
        assert not store.is_total, f"{store.buffer} is a total of columns, and this kernel reduces no rows"
        place = self.place(store, known)
        stored = self._as_stored(store, known)
        value, source = known[stored], stored.dtype
        unchanged = isinstance(stored, Load) and stored.memory_dtype == store.memory_dtype and store.mode == "set"
        if unchanged and value in self.bits:
            text = f"{place} = {self.bits[value]};"
            return text if store.mask is None else f"if ({known[store.mask]}) {text}"
        if store.is_atomic:
            source = torch.float32 if store.memory_dtype in (torch.bfloat16, torch.float16) else store.memory_dtype
            present, value = load_text(place, store.memory_dtype), cast_text(value, stored.dtype, source)
            if store.mode == "add":
                value = f"{present} + {value}"
            else:
                name = "maximum" if store.mode == "max" else "minimum"
                value = f"{name}<{C_TYPE[source]}>({present}, {value})"
        text = f"{place} = {store_text(value, source, store.memory_dtype)};"
        return text if store.mask is None else f"if ({known[store.mask]}) {text}"

    def _as_stored(self, store: Store, known: Mapping[Value, str]) -> Value:
        """Return the value to store, without selects that `facts` decide and conversions that the store does anyway."""
        stored = store.value
        while store.mode == "set":
            decided = isinstance(stored, Op) and stored.name == "where" and stored.args[0] in self.facts
            converts = isinstance(stored, Cast) and stored.to == store.memory_dtype
            if not (decided or converts):
                break
            (behind,) = self.operands_of(stored)
            if behind not in known:
                break
            stored = behind
        return stored

    def needed(self, roots: Iterable[Value], known: Mapping[Value, str]) -> list[Value]:
        """Return the values that must be computed for `roots` in addition to `known`, operands first."""
        found: set[Value] = set()
        stack = [root for root in roots if root not in known]
        while stack:
            value = stack.pop()
            if value not in found:
                found.add(value)
                stack.extend(operand for operand in self.operands_of(value) if operand not in known)
        return sorted(found, key=self.number.__getitem__)

    def operands_of(self, value: Value) -> tuple[Value, ...]:
        """Return the operands that `value` is computed from, given `facts`."""
        if value in self.facts:
            return ()
        if isinstance(value, Op) and value.name == "where" and value.args[0] in self.facts:
            return (value.args[1 if self.facts[value.args[0]] else 2],)
        if isinstance(value, Load) and value.mask is not None and value.mask in self.facts:
            return tuple(index for _, index in value.indirect) if self.facts[value.mask] else ()
        if isinstance(value, Load) and value in self.always_in_bounds:
            return tuple(index for _, index in value.indirect)
        return value.operands()

    def define(self, values: Iterable[Value], known: dict[Value, str]) -> None:
        """Write `const` definitions of values, and add their names to `known`."""
        for value in values:
            if value in self.facts:
                known[value] = "true" if self.facts[value] else "false"
                continue
            if isinstance(value, Constant):
                text = constant_text(value.number, value.dtype)
                known[value] = f"({text})" if text.startswith("-") else text
                continue
            if isinstance(value, Load):
                self.define_load(value, self.element(value, known), known)
                continue
            name = known[value] = f"v{self.number[value]}"
            self.line(f"const {C_TYPE[value.dtype]} {name} = {self.statement(value, known)};")

    def define_load(self, load: Load, element: str, known: dict[Value, str]) -> None:
        """Write the definition of a load whose `element` is an expression, and add its name to `known`."""
        name = f"v{self.number[load]}"
        if load.memory_dtype in FORMAT:
            bits = self.bits[name] = f"b{self.number[load]}"
            self.line(f"const {MEMORY_TYPE[load.memory_dtype]} {bits} = {element};")
            self.line(f"const float {name} = load_{FORMAT[load.memory_dtype]}({bits});")
        else:
            self.line(f"const {C_TYPE[load.dtype]} {name} = {element};")
        known[load] = name


def _counts_a_condition(index: Value) -> bool:
    """Whether an index may be computed from a condition that is used as the number 0 or 1."""
    found: set[Value] = set()
    stack = [index]
    while stack:
        value = stack.pop()
        if value in found or not isinstance(value, Cast | Op | Checked):
            continue
        found.add(value)
        if isinstance(value, Checked):
            stack.append(value.arg)
        elif isinstance(value, Cast) and value.arg.dtype == torch.bool:
            return True
        elif isinstance(value, Op) and value.name == "where":
            if all(isinstance(branch, Constant | Index) for branch in value.args[1:]):
                return True
            stack.extend(value.args[1:])
        else:
            stack.extend(value.operands())
    return False


def _checks_guard(load: Load) -> bool:
    """Whether every part of a load's mask is also checked for its indices, and index 0 of a failed check is in bounds.

    Such a load needs no condition, which would prevent vectorization of the loop around it.
    """
    asked: set[Value] = set()
    for _, index in load.indirect:
        if isinstance(index, Checked):
            parts = set(_parts(index.condition))
            if not all(_holds_for_zero(part, index.arg) for part in parts):
                return False
            asked |= parts
    return load.mask is not None and asked.issuperset(_parts(load.mask))


def _parts(condition: Value) -> list[Value]:
    """Return the conditions whose conjunction is `condition`."""
    if isinstance(condition, Op) and condition.name == "logical_and":
        return [part for arg in condition.args for part in _parts(arg)]
    return [condition]


def _holds_for_zero(condition: Value, index: Value) -> bool:
    """Whether `condition` is a bound on `index` that 0 satisfies."""
    if not isinstance(condition, Op) or condition.args[0] is not index:
        return False
    limit = whole_number(condition.args[1])
    if limit is None or not limit.is_Integer:
        return False
    return bool(limit <= 0) if condition.name == "ge" else condition.name == "lt" and bool(limit > 0)
