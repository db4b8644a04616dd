"""Plain values and our own frozen dataclasses as JSON, and back.

Nothing is unpickled: what may be rebuilt are numbers, texts, tuples, sympy expressions, dtypes, devices and dataclasses
that overlapc itself defines.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import sympy
import torch

from overlapc.warm.fingerprint import NotCacheable

UNREADABLE = (KeyError, TypeError, ValueError, ImportError, AttributeError)
"""What reading an entry of another make may raise; whole by its checksum, it is dropped and made again."""

_PLAIN = (bool, int, float, str)


def encode(value: Any) -> Any:
    """`value` in what `json.dumps` takes. NotCacheable for anything else than the above."""
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
        return {"sympy": sympy.srepr(value)}
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
    """The value that `encode` gave `data` for. ValueError for data that it never gives."""
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
    """What sympy's own representation of our index expressions may call."""
    from torch.utils._sympy import functions

    expressions = {name: held for name, held in vars(sympy).items() if isinstance(held, type)}
    return expressions | {name: held for name, held in vars(functions).items() if isinstance(held, type)}
