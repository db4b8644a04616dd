"""Estimators: the interface of a source of node times, and the chain that asks several sources in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from overlapc.schedule.model import Estimate, Kind, Node, Schedule

FREE = Estimate(0.0, "free")  # waits, views and no-ops: nothing is launched for them
_FREE_KINDS = (Kind.WAIT, Kind.VIEW, Kind.NOOP)


class Estimator(Protocol):
    """Estimates the time of some kinds of nodes."""

    @property
    def name(self) -> str:
        """The name of the source, as reports show it."""
        ...

    def estimate(self, node: Node) -> Estimate | None:
        """Return None for a node that this estimator does not know, so that the next one is asked. 0 means no cost."""
        ...


@dataclass(frozen=True)
class FirstKnown:
    """A chain of estimators that returns the first estimate which is not None.

    store: stores for other processes what the estimators have measured.
    """

    estimators: Sequence[Estimator]
    name: str = "chain"
    store: Callable[[], None] = lambda: None

    def estimate(self, node: Node) -> Estimate | None:
        if node.kind in _FREE_KINDS:
            return FREE
        for estimator in self.estimators:
            estimate = estimator.estimate(node)
            if estimate is not None:
                return estimate
        return None


def estimate_schedule(schedule: Schedule, estimator: Estimator) -> Schedule:
    """Return `schedule` with estimates by `estimator` for the nodes without one; unknown nodes keep None."""
    return schedule.with_estimates(
        {node.name: estimator.estimate(node) for node in schedule.nodes if node.estimate is None}
    )
