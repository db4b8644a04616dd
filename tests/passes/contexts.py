"""Contexts in which the rules of passes are tested."""

from dataclasses import replace

from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.passes.base import Context

KEPT = Context(peak_increase=100.0)  # passes keep the order of collectives on a queue
FREE = replace(KEPT, reorder_collectives=True)
TIGHT = replace(FREE, peak_increase=0.0)
LATE = replace(FREE, overlap_margin=1.5)
BEHIND = replace(FREE, profile=DeviceProfile("held", collectives_wait_for_kernels=True))
SLOW = replace(
    LATE,
    profile=DeviceProfile("slow", slowdowns={"other": Slowdown(1.5, 2.0)}, collective_slowdown=1.5, launch_ns=2e3),
)
