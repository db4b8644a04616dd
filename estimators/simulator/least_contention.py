"""The least time that collectives cost the compute stream, whatever runs beside what.

While a collective runs it slows the kernel beside it, or the stream stands still. An order may choose the kernel, but
kernels that lose little are few. So this is a linear program, in which any part of a collective may run beside any
kernel for as long as that lasts. With `x[c, k]` the time that collectives of kind `c` run beside kernels of kind `k`:

    least    sum of x[c, k] * (1 - 1 / slow[c, k])                         what compute loses
    so that  sum over k of x[c, k] / stretch[c, k] = time of all collectives of kind c
             sum over c of x[c, k] / slow[c, k] <= time of all kernels of kind k

Standing still is a kind of kernel that lasts as long as one likes and loses all of its time; a stream that stands still
anyhow (between kernels) loses nothing. Any prices of a collective's time bound the program from below (its dual): how
well they are chosen decides how tight the bound is, not whether it holds.

It is taken for one queue at a time. A collective of another queue beside it may cost nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence

from overlapc.estimators.simulator.machine import Costs, StepKind

_FINEST = 1e-5  # of a price: further steps change a bound by less than that share of the collectives' time


def least_contention_ns(costs: Costs, idle_ns: float) -> float:
    """Time that every order needs over and above what its kernels take alone and `idle_ns`.

    idle_ns: the stream stands still for that long anyhow.
    """
    kernels: dict[int, float] = {}  # load -> time of its kernels
    queues: list[dict[int, float]] = [{} for _ in range(costs.queues)]  # of each: traffic -> time of its collectives
    for at, step in enumerate(costs.step):
        if step == StepKind.COMPUTE:
            kernels[costs.load[at]] = kernels.get(costs.load[at], 0.0) + costs.ns[at]
        elif step == StepKind.START:
            collectives = queues[costs.queue[at]]
            collectives[costs.traffic[at]] = collectives.get(costs.traffic[at], 0.0) + costs.ns[at]
    return max((_Prices(costs, kernels, each, idle_ns).highest_ns() for each in queues if each), default=0.0)


class _Prices:
    """The dual for one queue: a price for each kind of collective. One kind costs any kernel the same."""

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
        """The best bound that is found by moving all prices together and each by itself, by ever smaller steps."""
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
        """The bound that prices of at most 1 prove."""
        bound = sum(price * ns for price, ns in zip(prices, self.collectives_ns, strict=True))
        for row, ns in self.kernels_ns.items():
            worth = max(price * gain - loss for price, (gain, loss) in zip(prices, row, strict=True))
            if worth > 0.0:
                bound -= worth * ns
        return bound
