"""Time that a compiled graph takes on the host.

A host runs ahead of its device and does not wait for it. So in a loop of steps the slower of the two determines the
step time, whatever the order of the nodes: the simulator's time, or the host's time for all graphs, which this file
estimates. Only if the device is idle (in the first step of a loop, or after an `.item()`) does it matter when each node
is launched, which the simulator models with `DeviceProfile.launch_ns`.
"""

from __future__ import annotations

from collections import Counter

from overlapc.estimators.device import DeviceProfile
from overlapc.schedule.model import Kind, Schedule


def host_ns(schedule: Schedule, profile: DeviceProfile) -> float | None:
    """Return the host's time for one call of the graph in ns, or None if the profile has no host costs.

    Also None for a synchronous device: the host itself computes, so the simulator's time is the host's time.
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
        + costs.tensor * max(0, waits - starts)  # each tensor of a coalesced collective has its own wait
    )


def crossing(schedule: Schedule) -> int:
    """Return the number of input and output tensors of the graph."""
    return len(schedule.outputs) + sum(buffer.is_input for buffer in schedule.buffers.values())
