"""Why a collective was not moved further: the limiting factors that reports name."""

from __future__ import annotations

from enum import Enum

from overlapc.schedule.dependencies import Why


class Reason(Enum):
    """A limiting factor, as reports print it; `{}` is replaced, mostly by the name of another node."""

    HIDDEN = "hidden"  # completely: moving it further gains nothing
    DATA = "data dependence on {}"
    ORDER_EDGE = "has to come after {}"  # an `after` or mutation edge
    BEFORE = "has to come before {}"  # the same kind of edge, as the limit of a wait
    MEMORY = "peak memory"
    COLLECTIVE_ORDER = "collective order: {} is first"
    BARRIER = "{} is a barrier"
    QUEUE = "queue busy with {}"  # a collective that starts earlier would only wait on the queue
    # The next collective cannot begin any sooner, wherever this wait stands.
    NEXT_ON_QUEUE = "waiting later gains nothing: {} is next on this queue"
    SCHEDULE_START = "start of schedule"
    SCHEDULE_END = "end of schedule"
    WOULD_EXPOSE = "would expose {}"
    READER = "{} reads it"
    CUT = "split off from its bucket: launching the whole bucket at once would cost more time or memory"
    NO_BUCKET = "cannot be merged: {}"
    MERGED = "bucket of {}"
    FILLED = "all ready compute overlaps it already"
    REFINED = "every other place that was tried makes the step longer"
    SLOWER = "undone: the simulated step became longer"  # every move of the pass was undone

    def about(self, node: str = "") -> str:
        """Return the reason in words, such as `data dependence on mm3`."""
        return self.value.format(node) if "{}" in self.value else self.value


def reason_of(why: Why, *, of_wait: bool = False) -> Reason:
    """Return the limiting factor for an edge: of the start that it leads to, or (`of_wait`) the wait it comes from."""
    return {
        Why.DATA: Reason.READER if of_wait else Reason.DATA,
        Why.MUTATION: Reason.BEFORE if of_wait else Reason.ORDER_EDGE,
        Why.AFTER: Reason.BEFORE if of_wait else Reason.ORDER_EDGE,
        Why.COLLECTIVE_ORDER: Reason.NEXT_ON_QUEUE if of_wait else Reason.COLLECTIVE_ORDER,
        Why.BARRIER: Reason.BARRIER,
    }[why]
