"""Times from the user, which override all models: a function, or the times of an earlier run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from overlapc.errors import ConfigError
from overlapc.schedule.model import Estimate, Node

Hook = Callable[[Node], "Estimate | float | None"]  # a number is ns; None: the next estimator is asked


@dataclass(frozen=True)
class UserHook:
    """An estimator that calls the function given as `estimates=`."""

    hook: Hook
    name: str = "user"

    def estimate(self, node: Node) -> Estimate | None:
        """Return the function's result. Raise ConfigError if it is not a time or None."""
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
    """Times of nodes in an earlier run, looked up by name in the same graph, else by signature."""

    by_name: Mapping[str, tuple[str, float]]  # node of this graph -> its signature ("" if not known), ns
    by_signature: Mapping[str, float] = field(default_factory=dict)
    name: str = "earlier run"

    @classmethod
    def of(cls, graph: str, seen: Mapping[tuple[str, str], tuple[str, float]], name: str) -> EarlierRun:
        """Build the estimator for `graph` from (graph, node) -> (signature, ns) of all graphs that ran."""
        like: dict[str, list[float]] = {}
        for signature, ns in seen.values():
            if signature:
                like.setdefault(signature, []).append(ns)
        by_name = {node: found for (where, node), found in seen.items() if where == graph}
        return cls(by_name, {signature: median(times) for signature, times in like.items()}, name)

    def estimate(self, node: Node) -> Estimate | None:
        """Return the time of the node with the same name if its signature is the same, else the median time of nodes
        with the same signature, else None."""
        own = signature_of(node)
        signature, ns = self.by_name.get(node.name, (None, 0.0))
        if signature is not None and signature in ("", own):
            return Estimate(ns, self.name)
        found = self.by_signature.get(own)
        return None if found is None else Estimate(found, f"{self.name}, nodes like it")


def signature_of(node: Node) -> str:
    """Return what determines a node's time as text: op, sizes, dtype, group, transport; not its name or position."""
    parts: list[object] = [node.kind.value, node.op]
    if node.work is not None:
        work = node.work
        parts += [work.flops, work.read_bytes, work.write_bytes, work.dtype, work.form]
    if node.comm is not None:
        comm = node.comm
        parts += [comm.carried, comm.bytes, comm.group, comm.size, comm.dtype]
    return " ".join(map(str, parts))
