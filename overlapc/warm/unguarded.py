"""Check by name the guards that torch leaves out when it stores a trace.

With `caching_precompile` torch 2.11 to 2.13 drops every guard on an object's identity, because an address means nothing
in another process. So a model whose activation is another function would run the trace of the first one. The guarded
object is either reachable from a module of the program (`G['helper']`, an import): then a later process looks it up
there and compares it (`Named`). Or it belongs to the arguments (`L['self'].act`), which do not exist yet when a trace
is loaded: a trace that depends on it is not stored (`Unguarded`).
"""

from __future__ import annotations

import builtins
import enum
import hashlib
import importlib
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import Guard

from overlapc.errors import OverlapcError

# The kinds of guards (when created, or as finally built) that torch does not store. These are more than any one version
# drops: checking a guard here that torch stores, too, costs only a look-up.
_DROPPED = frozenset(
    {
        "ID_MATCH",
        "CLOSURE_MATCH",
        "FUNCTION_MATCH",
        "BUILTIN_MATCH",
        "CLASS_MATCH",
        "MODULE_MATCH",
        "NN_MODULE",
        "WEAKREF_ALIVE",
        "DICT_VERSION",
    }
)
_ALIAS = "__import_"  # prefix of a module that Dynamo put into a function's globals
_BUILTINS = "__builtins_dict__"


class Unguarded(OverlapcError):
    """A trace depends on something that a later process could not check."""


@dataclass(frozen=True)
class Named:
    """An object that a trace depends on: an expression over the globals `G` of a module, and its value's identity."""

    expression: str
    identity: str

    def expect(self, module: str) -> None:
        """Raise Unguarded if the expression has another value in this process."""
        found = _identity(_look_up(self.expression, module), self.expression)
        if found != self.identity:
            raise Unguarded(f"{self.expression} is {found} and was {self.identity}")


def named(guards: Iterable[Guard], module: str) -> tuple[Named, ...]:
    """Return the objects that must not change for a trace of a function in `module` to be valid, and torch leaves out.

    Raises Unguarded if one cannot be identified by name.
    """
    expressions = dict.fromkeys(_dropped(guards))
    return tuple(Named(each, _identity(_look_up(each, module), each)) for each in expressions)


def _dropped(guards: Iterable[Guard]) -> Iterator[str]:
    for guard in guards:
        if guard.create_fn_name() in _DROPPED or not _DROPPED.isdisjoint(guard.guard_types or ()):
            if "L[" in guard.name:
                raise Unguarded(f"it depends on which object {guard.name} is")
            yield guard.name


def _look_up(expression: str, module: str) -> Any:
    """Evaluate `expression`, Dynamo's own text for where it found an object, as Dynamo does."""
    try:
        return eval(expression, {"G": _Globals(vars(importlib.import_module(module)))})
    except (ImportError, AttributeError, LookupError, NameError, SyntaxError, TypeError) as error:
        raise Unguarded(f"{expression} cannot be looked up in {module}: {error}") from error


class _Globals(dict[str, Any]):
    """A module's globals, together with those that Dynamo would add."""

    def __missing__(self, name: str) -> Any:
        if name.startswith(_ALIAS):
            return importlib.import_module(name.removeprefix(_ALIAS).replace("_dot_", "."))
        if name.startswith(_BUILTINS):
            return vars(builtins)
        raise KeyError(name)


def _identity(value: Any, expression: str) -> str:
    """Return a text that identifies `value` in any process; raise Unguarded if there is none for its type."""
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, types.FunctionType):
        return f"function {value.__module__}.{value.__qualname__} {_code_hash(value.__code__)}"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    if isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
        return f"builtin {value.__module__ if hasattr(value, '__module__') else ''}.{value.__qualname__}"
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"operator {value}"
    if value is None or isinstance(value, bool | int | str | enum.Enum | torch.dtype | torch.device):
        return f"{type(value).__name__} {value!r}"
    raise Unguarded(f"it depends on which {type(value).__name__} {expression} is")


def _code_hash(code: types.CodeType) -> str:
    """Return a hash of a function's code: two lambdas on one line have the same name."""
    return hashlib.sha256("\n".join(_code_lines(code)).encode()).hexdigest()[:16]


def _code_lines(code: types.CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_lines(constant)
        else:
            yield repr(constant)
