"""Where an FX node comes from: the user's line and the module, as Dynamo recorded them."""

from __future__ import annotations

import os
import re

from torch.fx import Node

from overlapc.ir.ops import Provenance

_FRAME = re.compile(r'^ *File "(.+)", line (\d+).*\n?(?! *File ") *(.*)', re.MULTILINE)
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "parallel", "")  # between a user's module and its call


def provenance(node: Node) -> Provenance:
    """Where `node` comes from: innermost user frame and module path, as Dynamo recorded them."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    theirs = [frame for frame in frames if not frame[0].startswith(_OURS)] or frames
    lines = tuple("{}:{}: {}".format(*frame) for frame in theirs[-1:])
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module = next(reversed(stack.values()))[0] if stack else ""
    return Provenance((node.name,), lines, clean_module(module))


def clean_module(path: str) -> str:
    """`L['self']._modules['layers']._modules['0']` or `L['self'].layers[0]` as `layers.0`."""
    for old, new in (
        ("L['self']", ""),
        ("._modules['", "."),
        ("']", ""),
        ("['", "."),
        ("[", "."),
        ("]", ""),
        ("L.", ""),
    ):
        path = path.replace(old, new)
    return path.strip(".").removeprefix("self.")
