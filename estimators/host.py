"""What a compiled graph costs the host.

A host runs ahead of its device, which never holds it back. So in a loop of steps whichever of the two needs longer for
a step says how long it takes, in whatever order nodes stand: the simulator's time, or the host's for all graphs
together. What stands here is the host's. Only where a device has run dry (at a loop's first step, or behind a
`.item()`) it also matters when each node is launched, which the simulator knows by `DeviceProfile.launch_ns`.
"""

from __future__ import annotations

from collections import Counter

from overlapc.estimators.device import DeviceProfile
from overlapc.schedule.model import Kind, Schedule


def host_ns(schedule: Schedule, profile: DeviceProfile) -> float | None:
    """The host's time for one call of the graph; None where the profile does not know.

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
