"""Time that a compiled graph takes on the host.

A host runs ahead of its device and never waits for it. So in a loop of steps the slower of the two determines the step
time, in whatever order nodes stand: the simulator's time, or the host's time for all graphs, which this file estimates.
Only if the device is idle (at the first step of a loop, or after an `.item()`) does it also matter when each node is
launched, which the simulator models by `DeviceProfile.launch_ns`.
"""

from __future__ import annotations

from collections import Counter

from overlapc.estimators.device import DeviceProfile
from overlapc.schedule.model import Kind, Schedule


def host_ns(schedule: Schedule, profile: DeviceProfile) -> float | None:
    """The host's time for one call of the graph, in ns; None if the profile has no host costs.

    None, too, where the host computes itself: then the simulator's time is the host's.
    """
    costs = profile.host
    if costs is None or profile.synchronous:
        return None
    count = Counter(node.kind for node in schedule.nodes)
    starts, waits = count[Kind.START], count[Kind.WAIT]
    return (
        costs.graph
        + costs.argument * crossing(schedule)
        + costs.kernel * count[Kind.KERNEL]
        + costs.call * count[Kind.EXTERN]
        + costs.collective * (starts + count[Kind.COMM])
        + costs.tensor * max(0, waits - starts)  # each tensor of a coalesced collective has a wait of its own
    )


def crossing(schedule: Schedule) -> int:
    """How many tensors go into the graph or come out."""
    return len(schedule.outputs) + sum(buffer.is_input for buffer in schedule.buffers.values())
