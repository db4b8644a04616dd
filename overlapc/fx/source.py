"""The user's line and the module that an FX node comes from, as the tracer recorded them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from torch.fx import Node

_FRAME = re.compile(r'^ *File "(.+)", line (\d+).*\n?(?! *File ") *(.*)', re.MULTILINE)
_MEMBER = re.compile(r"list\(dict\.values\(((?:(?!list\().)*?)\._modules\)\)\[(\d+)\]")
_WRAPPED = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})  # the module within checkpoint_wrapper, torch.compile
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "parallel", "")  # between a user's module and its call


def user_line(node: Node) -> str:
    """`model.py:12: x = self.head(x)`: the innermost frame that is the user's; empty where none is known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    theirs = [frame for frame in frames if not frame[0].startswith(_OURS)] or frames
    return "{}:{}: {}".format(*theirs[-1]) if theirs else ""


def module_path(node: Node) -> str:
    """`layers.0.attention`: the innermost module; of a backward node its forward node's. Empty where none is known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if stack:
        return clean_module(next(reversed(stack.values()))[0])
    custom = node.meta.get("custom")
    # Graphs of make_fx have no stack of modules; torchtitan's graph_trainer annotates its modules with their names.
    return str(custom.get("module_fqn", "")) if isinstance(custom, Mapping) else ""


def block_of(module: str) -> str:
    """`layers.0` of `layers.0.attention.wq`: the outermost member of a list of modules, else the module itself."""
    parts = module.split(".")
    ends = next((at for at, part in enumerate(parts, 1) if part.isdigit()), len(parts))
    return ".".join(parts[:ends])


def clean_module(path: str) -> str:
    """`L['self']._modules['layers']._modules['0']` or `L['self'].layers[0]` as `layers.0`.

    So, too, `list(dict.values(L['self'].layers._modules))[0]`, as Dynamo calls what a Sequential iterates over; a model
    that is compiled in place, or is a Sequential, it calls `fn`.
    """
    while path != (path := _MEMBER.sub(r"\1.\2", path)):
        pass
    for old, new in (
        (".forward._torchdynamo_inline.__self__", ""),  # of a block that torch.compile(block) wraps
        ("L['self']", ""),
        ("L['fn']", ""),
        ("._modules['", "."),
        ("']", ""),
        ("['", "."),
        ("[", "."),
        ("]", ""),
        ("L.", ""),
    ):
        path = path.replace(old, new)
    return ".".join(part for part in path.strip(".").removeprefix("self.").split(".") if part not in _WRAPPED)
