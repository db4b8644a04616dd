"""Where an FX node comes from: the user's line and the module, as Dynamo recorded them."""

from __future__ import annotations

from torch.fx import Node

from overlapc.ir.ops import Provenance


def provenance(node: Node) -> Provenance:
    """Where `node` comes from: innermost user frame and module path, as Dynamo recorded them."""
    source = ""
    trace = node.meta.get("stack_trace") or ""
    frames = [line.strip() for line in trace.splitlines()]
    for at in range(len(frames) - 1, -1, -1):
        if frames[at].startswith("File "):
            _, path, rest = frames[at].split('"', 2) if frames[at].count('"') >= 2 else ("", "", frames[at])
            number = rest.split("line ", 1)[-1].split(",")[0]
            code = frames[at + 1] if at + 1 < len(frames) and not frames[at + 1].startswith("File ") else ""
            source = f"{path}:{number}: {code}"
            break
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module = next(reversed(stack.values()))[0] if stack else ""
    return Provenance((node.name,), source, clean_module(module))


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
