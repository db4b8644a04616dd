"""The objects that a printed wrapper calls, described as text from which another process can find them again."""

from __future__ import annotations

import importlib
import json
import linecache
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, MethodType
from typing import Any

import torch

from overlapc.fx.versions.sharding import group_name_of, resolve_group
from overlapc.runtime import support
from overlapc.runtime.copies.pool import GraphCopies

Boxed = Callable[[list[Any]], tuple[Any, ...]]


def function_of(source: str, filename: str, names: Mapping[str, Any]) -> Boxed:
    """Execute a wrapper's source and return its function `call`; `names` holds the objects that it calls."""
    # Registered so that tracebacks and debuggers show the generated lines.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    space = dict(names)
    exec(compile(source, filename, "exec"), space)
    call: Boxed = space["call"]
    return call


def text_of(value: Any) -> str:
    """Return the text from which `rebuild` finds `value` in another process: `operator:mul`; "" if it cannot."""
    if isinstance(value, torch._ops.OpOverload):
        return f"torch.ops:{value}"
    if isinstance(value, torch.device):
        return f"torch.device:{value}"
    method = value.func if isinstance(value, partial) else value
    if isinstance(method, MethodType) and isinstance(method.__self__, GraphCopies):
        given = value.args if isinstance(value, partial) else ()
        return f"copies:{json.dumps([method.__self__.pool.name, method.__name__, *given])}"
    for kind, (attribute, _) in _WRAPPERS.items():
        inner = getattr(value, attribute, None)
        if inner is not None:
            text = text_of(inner)
            return f"{kind}:{text}" if text else ""
    group = group_name_of(value) if hasattr(getattr(value, "real_obj", value), "group_name") else None
    if group is not None:
        return f"group:{group}"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module in _MODULES and getattr(importlib.import_module(module), name, None) is value:
        return f"{module}:{name}"
    return ""


# Functions that wrap an op: the attribute that holds the op, and the function that wraps it.
_WRAPPERS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "owned": ("copies_results_of", support.owned),
    "offset": ("offset_of_result_of", support.offset_of),
}

_MODULES = frozenset(
    {
        "torch",
        "operator",
        "_operator",
        "math",
        "builtins",
        "overlapc.runtime.collective_ops",
        "overlapc.runtime.philox",
        "overlapc.runtime.support",
    }
)


def rebuild(text: str, copies: Mapping[str, GraphCopies] = MappingProxyType({})) -> Any:
    """Return the object that `text_of` described. copies: the graph's copies, by the name of their pool."""
    module, _, path = text.partition(":")
    if module == "copies":
        group, method, *given = json.loads(path)
        run = getattr(copies[group], method)
        return partial(run, *given) if given else run
    if module in _WRAPPERS:
        _, wrap = _WRAPPERS[module]
        return wrap(rebuild(path))
    if module == "torch.device":
        return torch.device(path)
    if module == "group":
        return resolve_group(path)
    held: Any = torch.ops if module == "torch.ops" else importlib.import_module(module)
    for part in path.split(".") if path else ():
        held = getattr(held, part)
    return held
