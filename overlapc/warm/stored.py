"""Convert plain values and overlapc's own frozen dataclasses to JSON and back.

Nothing is unpickled: only numbers, strings, tuples, lists, dicts, frozen sets, sympy expressions, dtypes, devices and
dataclasses that overlapc itself defines can be rebuilt.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import sympy
import torch

from overlapc.ir.indexing import ModularIndexing
from overlapc.warm.fingerprint import NotCacheable

UNREADABLE = (KeyError, TypeError, ValueError, ImportError, AttributeError)
"""Errors that reading an entry of another version may raise, although its checksum is right; the entry is then dropped
and rebuilt."""

_PLAIN = (bool, int, float, str)


def encode(value: Any) -> Any:
    """Return `value` in types that `json.dumps` takes; raise NotCacheable for types not listed above."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, frozenset):
        return {"frozenset": [encode(item) for item in sorted(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, sympy.Basic):
        text = sympy.srepr(value)
        try:
            _expression(text)
        except NameError as error:  # a name that is no class: oo, or true, the last condition of every Piecewise
            raise NotCacheable(f"the expression {value} cannot be stored") from error
        return {"sympy": text}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    kind = type(value)
    if dataclasses.is_dataclass(kind) and kind.__module__.startswith("overlapc."):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(kind)}
        return {"data": f"{kind.__module__}:{kind.__qualname__}", "fields": fields}
    raise NotCacheable(f"a {kind.__module__}.{kind.__qualname__} cannot be stored")


def decode(data: Any) -> Any:
    """Return the value that `encode` converted to `data`; raise ValueError for data that it never returns."""
    if data is None or isinstance(data, _PLAIN):
        return data
    if isinstance(data, list):
        return [decode(item) for item in data]
    match data:
        case {"tuple": items}:
            return tuple(decode(item) for item in items)
        case {"frozenset": items}:
            return frozenset(decode(item) for item in items)
        case {"dict": pairs}:
            return {decode(key): decode(item) for key, item in pairs}
        case {"sympy": text}:
            return _expression(text)
        case {"dtype": name}:
            return getattr(torch, name)
        case {"device": name}:
            return torch.device(name)
        case {"data": name, "fields": fields}:
            return _class(name)(**{key: decode(item) for key, item in fields.items()})
    raise ValueError(f"not a stored value: {str(data)[:80]}")


@functools.cache
def _class(name: str) -> Any:
    module, _, path = name.partition(":")
    found = getattr(importlib.import_module(module), path) if module.startswith("overlapc.") else None
    if not dataclasses.is_dataclass(found):
        raise ValueError(f"not a dataclass of overlapc: {name}")
    return found


@functools.cache
def _expression(text: str) -> sympy.Basic:
    return eval(text, {"__builtins__": {}}, _names())


@functools.cache
def _names() -> dict[str, Any]:
    """Return the names that sympy's `srepr` of index expressions may call."""
    from torch.utils._sympy import functions

    expressions = {name: held for name, held in vars(sympy).items() if isinstance(held, type)}
    functions_of_torch = {name: held for name, held in vars(functions).items() if isinstance(held, type)}
    return expressions | functions_of_torch | {ModularIndexing.__name__: ModularIndexing}
