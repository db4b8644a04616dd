"""The user's source line and the module that an FX node comes from, as recorded during tracing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache

from torch.fx import Node

_FRAME = re.compile(r'^ *File "(.+)", line (\d+).*\n?(?! *File ") *(.*)', re.MULTILINE)
_MEMBER = re.compile(r"list\(dict\.values\(((?:(?!list\().)*?)\._modules\)\)\[(\d+)\]")
_WRAPPED = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})  # inner module of checkpoint_wrapper, torch.compile
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "parallel", "")  # not the user's frames


def user_line(node: Node) -> str:
    """Return the innermost frame in the user's code, as `model.py:12: x = self.head(x)`; empty if unknown."""
    return _line(node.meta.get("stack_trace") or "")


@lru_cache(4096)  # the layers of a model have the same lines
def _line(stack_trace: str) -> str:
    frames = _FRAME.findall(stack_trace)
    theirs = [frame for frame in frames if not frame[0].startswith(_OURS)] or frames
    return "{}:{}: {}".format(*theirs[-1]) if theirs else ""


def module_path(node: Node) -> str:
    """Return the path of the innermost module, such as `layers.0.attention`; empty if unknown.

    A backward node has the module of its forward node.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if stack:
        return clean_module(next(reversed(stack.values()))[0])
    custom = node.meta.get("custom")
    # Graphs of make_fx have no stack of modules; torchtitan's graph_trainer annotates its modules with their names.
    return str(custom.get("module_fqn", "")) if isinstance(custom, Mapping) else ""


def block_of(module: str) -> str:
    """Return the outermost member of a module list in a path (`layers.0` of `layers.0.attention.wq`), else the path."""
    return next(iter(members_of_lists(module)), module)


@lru_cache(4096)
def members_of_lists(module: str) -> tuple[str, ...]:
    """Return the members of module lists in a path, the outermost first: `stages.1`, `stages.1.layers.0`."""
    parts = module.split(".")
    return tuple(".".join(parts[:end]) for end, part in enumerate(parts, 1) if part.isdigit())


@lru_cache(4096)
def clean_module(path: str) -> str:
    """Rewrite Dynamo's name of a module as a path: `L['self']._modules['layers']._modules['0']` as `layers.0`.

    So also `L['self'].layers[0]`, and `list(dict.values(L['self'].layers._modules))[0]`, Dynamo's name of a module that
    a Sequential iterates over. Dynamo calls the model `fn` if it is compiled in place, or is a Sequential, and
    `args[0]` if its `forward` has a decorator.
    """
    while path != (path := _MEMBER.sub(r"\1.\2", path)):
        pass
    for old, new in (
        (".forward._torchdynamo_inline.__self__", ""),  # in names of a block wrapped by torch.compile(block)
        ("L['self']", ""),
        ("L['fn']", ""),
        ("L['args'][0]", ""),
        ("._modules['", "."),
        ("']", ""),
        ("['", "."),
        ("[", "."),
        ("]", ""),
        ("L.", ""),
    ):
        path = path.replace(old, new)
    return ".".join(part for part in path.strip(".").removeprefix("self.").split(".") if part not in _WRAPPED)
