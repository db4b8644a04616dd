"""For each kind of Dynamo guard, the part of a value that the guard compares.

Two values of one type pass or fail alike if these parts are equal.

torch 2.12 and later have the same information (`GuardCheckSpec`), in a slightly different form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch._dynamo.source import AttrSource, NNModuleSource
from torch._guards import ChainedSource, Guard, Source
from torch._library.opaque_object import get_opaque_obj_info
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from overlapc.fx.constants import exactly


class _Same:
    """A value compared by identity. It is held, so that no other object gets its `id`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


class _Doing(_Same):
    """A function compared by what it does: torch's tensor parallelism gives each module hooks of its own."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Doing) and _do_the_same(self.value, other.value)

    __hash__ = None


def _do_the_same(one: Any, other: Any, around: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether functions, or values that they hold, must do the same: they have equal code over values that do the same.

    Objects are compared by identity, except for constants, and for styles of tensor parallelism with their meshes.
    around: the pairs, by `id`, that hold these two; a function may hold itself.
    """
    pair = id(one), id(other)
    if one is other or pair in around:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, DeviceMesh):
        return bool(one == other) and _group_names(one) == _group_names(other)
    parts_of = _of_style if isinstance(one, ParallelStyle) else _PARTS.get(type(one))
    if parts_of is None:
        return isinstance(one, int | float | str | Placement) and exactly(one) == exactly(other)
    mine, theirs = parts_of(one), parts_of(other)
    inner = around | {pair}
    return len(mine) == len(theirs) and all(_do_the_same(*each, inner) for each in zip(mine, theirs, strict=True))


def _group_names(mesh: DeviceMesh) -> list[str]:
    return [group.group_name for group in mesh.get_all_groups()]


def _of_function(function: FunctionType) -> Sequence[Any]:
    held = map(_contents, function.__closure__ or ())
    return [function.__code__, id(function.__globals__), function.__defaults__, function.__kwdefaults__, *held]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return cell


def _of_dictionary(values: dict[Any, Any]) -> Sequence[Any]:
    return [*values.keys(), *values.values()]


def _of_style(style: ParallelStyle) -> Sequence[Any]:
    return _of_dictionary(vars(style))


_PARTS: dict[type, Callable[[Any], Sequence[Any]]] = {
    FunctionType: _of_function,
    MethodType: lambda method: [method.__func__, method.__self__],
    partial: lambda function: [function.func, function.args, function.keywords],
    dict: _of_dictionary,
    tuple: tuple,
    list: tuple,
}


Compared = Callable[[dict[str, Any], Any], Any]  # takes the guard's keywords and a value


@lru_cache(1 << 12)
def is_within(source: Source, whole: Source) -> bool:
    """Whether a source names `whole` or a part of it; torch 2.11's `is_from_source` compares outermost names only."""
    return source == whole or (isinstance(source, ChainedSource) and is_within(source.base, whole))


def compared(guard: Guard) -> Compared | None:
    """Return the function that computes what a guard compares of a value; None for a kind that is not known here."""
    return _COMPARED.get(guard.create_fn_name())


def subject(guard: Guard) -> tuple[Source, dict[str, Any]]:
    """Return the source of the value that a guard compares, and the guard's other arguments."""
    source = guard.originating_source
    known = dict(getattr(guard.create_fn, "keywords", {}))
    if guard.create_fn_name() == "HASATTR" and "attr" not in known:  # before torch 2.13 it names the attribute
        attribute = source.base if isinstance(source, NNModuleSource) else source
        if isinstance(attribute, AttrSource):
            source, known["attr"] = attribute.base, attribute.member
    return source, known


def _tensor(given: dict[str, Any], value: Any) -> Any:
    strides = value.stride() if value.layout is torch.strided else None
    keys = torch._C._dispatch_keys(value).raw_repr()
    return value.shape, strides, value.dtype, value.layout, value.device, value.requires_grad, keys


def _opaque(given: dict[str, Any], value: Any) -> Any:
    known: Any = get_opaque_obj_info(type(value))
    return known.guard_fn(value) if known and known.guard_fn else None


_COMPARED: dict[str, Compared] = {
    **dict.fromkeys(
        ("ID_MATCH", "NN_MODULE", "FUNCTION_MATCH", "CLASS_MATCH", "MODULE_MATCH", "BUILTIN_MATCH"),
        lambda given, value: _Same(value),
    ),
    "CLOSURE_MATCH": lambda given, value: _Doing(value),
    **dict.fromkeys(
        ("BOOL_MATCH", "NONE_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH"), lambda given, value: exactly(value)
    ),
    "DTENSOR_SPEC_MATCH": lambda given, value: value,
    **dict.fromkeys(("SEQUENCE_LENGTH", "EMPTY_NN_MODULE_HOOKS_DICT"), lambda given, value: len(value)),
    **dict.fromkeys(("NOT_NONE_MATCH", "WEAKREF_ALIVE"), lambda given, value: value is None),
    **dict.fromkeys(
        ("DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"),
        lambda given, value: given["key"] in value,
    ),
    "NOT_PRESENT_IN_GENERIC_DICT": lambda given, value: given["attr"] in value.__dict__,
    "HASATTR": lambda given, value: "attr" not in given or hasattr(value, given["attr"]),
    "TYPE_MATCH": lambda given, value: type(value),
    "FAKE_SCRIPT_TYPE_MATCH": lambda given, value: type(value),
    "MAPPING_KEYS_CHECK": lambda given, value: list(value.keys()),
    "DICT_KEYS_MATCH": lambda given, value: list(dict.keys(value)),
    "TENSOR_MATCH": _tensor,
    "TENSOR_SUBCLASS_METADATA_MATCH": lambda given, value: value.__tensor_flatten__()[1],
    "OPAQUE_OBJ_GUARD_FN_MATCH": _opaque,
    "DUPLICATE_INPUT": lambda given, value: None,  # its two sources are compared by the caller
}
