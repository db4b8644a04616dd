"""A lower bound of the time that collectives cost the compute stream, over all choices of what overlaps what.

While a collective runs, it slows the overlapping kernel, or the stream is idle. An order may choose that kernel, but
only few kernels are slowed little. This is a linear program in which any part of a collective may overlap any kernel,
up to the kernel's time. With `x[c, k]` the time that collectives of kind `c` overlap kernels of kind `k`:

    minimize    sum of x[c, k] * (1 - 1 / slow[c, k])                         time lost by compute
    subject to  sum over k of x[c, k] / stretch[c, k] = time of all collectives of kind c
                sum over c of x[c, k] / slow[c, k] <= time of all kernels of kind k

An idle stream is a kind of kernel with unlimited time, all of which is lost; where the stream is idle in every order
(between kernels), nothing is lost. By duality, any prices of the collectives' time give a lower bound of the program:
the choice of prices affects how tight the bound is, not its validity.

The bound considers one queue at a time, because collectives of another queue that run meanwhile need not cost more.
"""

from __future__ import annotations

from collections.abc import Sequence

from overlapc.estimators.simulator.machine import Costs, StepKind

_FINEST = 1e-5  # smallest step of a price; it changes a bound by less than that fraction of the collectives' time


def least_contention_ns(costs: Costs, idle_ns: float) -> float:
    """Return the ns that every order needs in addition to its kernels' time without contention and `idle_ns`.

    idle_ns: time that the stream is idle in every order.
    """
    kernels: dict[int, float] = {}  # load -> time of its kernels
    queues: list[dict[int, float]] = [{} for _ in range(costs.queues)]  # by queue: traffic -> time of its collectives
    for at, step in enumerate(costs.step):
        if step == StepKind.COMPUTE:
            kernels[costs.load[at]] = kernels.get(costs.load[at], 0.0) + costs.ns[at]
        elif step == StepKind.START:
            collectives = queues[costs.queue[at]]
            collectives[costs.traffic[at]] = collectives.get(costs.traffic[at], 0.0) + costs.ns[at]
    return max((_Prices(costs, kernels, each, idle_ns).highest_ns() for each in queues if each), default=0.0)


class _Prices:
    """The dual program for one queue: a price for each kind of collective, where a kind has the same slowdowns."""

    def __init__(self, costs: Costs, kernels: dict[int, float], collectives: dict[int, float], idle_ns: float) -> None:
        kinds: dict[tuple[tuple[float, float], ...], float] = {}
        for traffic, ns in collectives.items():
            beside = []
            for load in kernels:
                slow, (stretch,) = costs.mix(load, (traffic,))
                beside.append((slow / stretch, slow - 1.0))
            kinds[tuple(beside)] = kinds.get(tuple(beside), 0.0) + ns
        self.collectives_ns = list(kinds.values())
        self.kernels_ns: dict[tuple[tuple[float, float], ...], float] = {((1.0, 0.0),) * len(kinds): idle_ns}
        for number, ns in enumerate(kernels.values()):
            row = tuple(beside[number] for beside in kinds)
            self.kernels_ns[row] = self.kernels_ns.get(row, 0.0) + ns

    def highest_ns(self) -> float:
        """Return the best bound found by changing all prices together and each separately, in ever smaller steps."""
        kinds = range(len(self.collectives_ns))
        prices, best, step = [0.0 for _ in kinds], 0.0, 0.5
        while step > _FINEST:
            before = best
            for chosen in (kinds, *((kind,) for kind in kinds)):
                for by in (step, -step):
                    moved = [min(1.0, max(0.0, each + by * (kind in chosen))) for kind, each in enumerate(prices)]
                    bound = self._bound_ns(moved)
                    if bound > best:
                        prices, best = moved, bound
            if best == before:
                step /= 2
        return best

    def _bound_ns(self, prices: Sequence[float]) -> float:
        """Return the lower bound that `prices`, each at most 1, prove."""
        bound = sum(price * ns for price, ns in zip(prices, self.collectives_ns, strict=True))
        for row, ns in self.kernels_ns.items():
            worth = max(price * gain - loss for price, (gain, loss) in zip(prices, row, strict=True))
            if worth > 0.0:
                bound -= worth * ns
        return bound
