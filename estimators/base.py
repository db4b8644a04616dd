"""Estimators: what a node will take, who says so, and who is asked first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from overlapc.schedule.model import Estimate, Kind, Node, Schedule

FREE = Estimate(0.0, "free")  # waits, views and no-ops: nothing is launched for them
_FREE_KINDS = (Kind.WAIT, Kind.VIEW, Kind.NOOP)


class Estimator(Protocol):
    """Anything that knows how long some nodes take."""

    @property
    def name(self) -> str:
        """Who says so, for reports."""
        ...

    def estimate(self, node: Node) -> Estimate | None:
        """None means "I don't know this node", and the chain asks the next; zero is for what costs nothing."""
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
    """`schedule` with what `estimator` says of each node without an estimate; what nobody knows stays None."""
    return schedule.with_estimates(
        {node.name: estimator.estimate(node) for node in schedule.nodes if node.estimate is None}
    )
