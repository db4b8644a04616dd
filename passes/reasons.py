"""Why a collective stopped where it did: the small set of reasons that reports use."""

from __future__ import annotations

from enum import Enum

from overlapc.schedule.dependencies import Why


class Reason(Enum):
    """A limiting factor; `{}` stands for another node."""

    HIDDEN = "hidden"  # completely: moving it further gains nothing
    DATA = "data dependence on {}"
    ORDER_EDGE = "has to come after {}"  # an `after` or mutation edge
    BEFORE = "has to come before {}"  # the same edge, of a wait
    MEMORY = "peak memory"
    COLLECTIVE_ORDER = "collective order: {} is first"
    BARRIER = "{} is a barrier"
    QUEUE = "queue busy with {}"  # starting sooner would only mean waiting on the queue
    # The next collective cannot begin any sooner, whatever becomes of this wait.
    NEXT_ON_QUEUE = "waiting later gains nothing: {} is next on this queue"
    SCHEDULE_START = "start of schedule"
    SCHEDULE_END = "end of schedule"
    WOULD_EXPOSE = "would expose {}"
    READER = "{} reads it"
    CUT = "its bucket is cut: whole, it would cost more time or memory"
    NO_BUCKET = "cannot be merged: {}"
    MERGED = "bucket of {}"
    FILLED = "all compute that was ready runs beside it"
    REFINED = "every other place that was tried makes the step longer"
    SLOWER = "undone: the simulated step became longer"  # all that this pass moved

    def about(self, node: str = "") -> str:
        """The reason in words: `data dependence on mm3`."""
        return self.value.format(node) if "{}" in self.value else self.value


def reason_of(why: Why, *, of_wait: bool = False) -> Reason:
    """The limiting factor that an edge stands for: of the start that it leads to, or of the wait it comes from."""
    return {
        Why.DATA: Reason.READER if of_wait else Reason.DATA,
        Why.MUTATION: Reason.BEFORE if of_wait else Reason.ORDER_EDGE,
        Why.AFTER: Reason.BEFORE if of_wait else Reason.ORDER_EDGE,
        Why.COLLECTIVE_ORDER: Reason.NEXT_ON_QUEUE if of_wait else Reason.COLLECTIVE_ORDER,
        Why.BARRIER: Reason.BARRIER,
    }[why]
