"""Times that override all models: a function of the user's, or times of an earlier run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from overlapc.errors import ConfigError
from overlapc.schedule.model import Estimate, Node

Hook = Callable[[Node], "Estimate | float | None"]  # ns where it is a number; None for "ask the next"


@dataclass(frozen=True)
class UserHook:
    """A function that the user gave as `estimates=`."""

    hook: Hook
    name: str = "user"

    def estimate(self, node: Node) -> Estimate | None:
        """The function's result; ConfigError if that is no time."""
        result = self.hook(node)
        if result is None or isinstance(result, Estimate):
            found = result
        elif isinstance(result, int | float) and not isinstance(result, bool):
            found = Estimate(float(result), self.name)
        else:
            raise ConfigError(
                f"estimates: the function returned {result!r} for {node.name}; return nanoseconds or None"
            )
        if found is not None and not (math.isfinite(found.ns) and found.ns >= 0):
            raise ConfigError(f"estimates: the function returned {found.ns!r} ns for {node.name}")
        return found


@dataclass(frozen=True)
class EarlierRun:
    """Times that nodes took in an earlier run: found by name in the same graph, else by signature."""

    by_name: Mapping[str, tuple[str, float]]  # node of this graph -> its signature ("" when not known), ns
    by_signature: Mapping[str, float] = field(default_factory=dict)
    name: str = "earlier run"

    @classmethod
    def of(cls, graph: str, seen: Mapping[tuple[str, str], tuple[str, float]], name: str) -> EarlierRun:
        """For `graph`, from (graph, node) -> (signature, ns) of all graphs that ran."""
        like: dict[str, list[float]] = {}
        for signature, ns in seen.values():
            if signature:
                like.setdefault(signature, []).append(ns)
        by_name = {node: found for (where, node), found in seen.items() if where == graph}
        return cls(by_name, {signature: median(times) for signature, times in like.items()}, name)

    def estimate(self, node: Node) -> Estimate | None:
        """The time of the node of that name, unless its signature has changed; else that of an equal signature."""
        own = signature_of(node)
        signature, ns = self.by_name.get(node.name, (None, 0.0))
        if signature is not None and signature in ("", own):
            return Estimate(ns, self.name)
        found = self.by_signature.get(own)
        return None if found is None else Estimate(found, f"{self.name}, nodes like it")


def signature_of(node: Node) -> str:
    """The fields that decide a node's time: op, sizes, dtype and group size, but not its name or place."""
    parts: list[object] = [node.kind.value, node.op]
    if node.work is not None:
        work = node.work
        parts += [work.flops, work.read_bytes, work.write_bytes, work.dtype]
    if node.comm is not None:
        comm = node.comm
        parts += [comm.collective, comm.bytes, comm.group, comm.size, comm.dtype]
    return " ".join(map(str, parts))
