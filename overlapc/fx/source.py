"""The user's line that an FX node comes from, as Dynamo recorded it."""

from __future__ import annotations

import os
import re

from torch.fx import Node

_FRAME = re.compile(r'^ *File "(.+)", line (\d+).*\n?(?! *File ") *(.*)', re.MULTILINE)
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "parallel", "")  # between a user's module and its call


def user_line(node: Node) -> str:
    """`model.py:12: x = self.head(x)`: the innermost frame that is the user's; empty where none is known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    theirs = [frame for frame in frames if not frame[0].startswith(_OURS)] or frames
    return "{}:{}: {}".format(*theirs[-1]) if theirs else ""
