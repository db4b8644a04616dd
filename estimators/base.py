"""Estimators: how long a node takes, which source says so, and in which order sources are asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from overlapc.schedule.model import Estimate, Kind, Node, Schedule

FREE = Estimate(0.0, "free")  # waits, views and no-ops: nothing is launched for them
_FREE_KINDS = (Kind.WAIT, Kind.VIEW, Kind.NOOP)


class Estimator(Protocol):
    """Estimates the time of some kinds of nodes."""

    @property
    def name(self) -> str:
        """The source that reports name."""
        ...

    def estimate(self, node: Node) -> Estimate | None:
        """None for a node that it does not know: the chain then asks the next. Zero is for nodes that cost nothing."""
        ...


@dataclass(frozen=True)
class FirstKnown:
    """Asks each estimator in turn and takes the first answer."""

    estimators: Sequence[Estimator]
    name: str = "chain"

    def estimate(self, node: Node) -> Estimate | None:
        if node.kind in _FREE_KINDS:
            return FREE
        for estimator in self.estimators:
            estimate = estimator.estimate(node)
            if estimate is not None:
                return estimate
        return None


def estimate_schedule(schedule: Schedule, estimator: Estimator) -> Schedule:
    """`schedule` with an estimate by `estimator` for each node that has none; None where `estimator` knows none."""
    return schedule.with_estimates(
        {node.name: estimator.estimate(node) for node in schedule.nodes if node.estimate is None}
    )
