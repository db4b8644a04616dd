"""Compute nodes from their FLOPs and bytes: the slower of arithmetic and memory, at achieved rates."""

from __future__ import annotations

from dataclasses import dataclass

from overlapc.estimators.device import DeviceProfile
from overlapc.schedule.model import Estimate, Kind, Node


@dataclass(frozen=True)
class Roofline:
    """Knows KERNEL and EXTERN nodes that say what they do; a node without `work` is unknown, never free."""

    profile: DeviceProfile

    @property
    def name(self) -> str:
        return f"roofline {self.profile.name}"

    def estimate(self, node: Node) -> Estimate | None:
        work, profile = node.work, self.profile
        if work is None or node.kind not in (Kind.KERNEL, Kind.EXTERN):
            return None
        seconds = 0.0
        if work.flops:
            # Generated kernels run on the vector units, whatever dtype they load and store.
            vector = profile.flops_per_s.get("vector") if node.kind is Kind.KERNEL else None
            rate = vector or profile.rate(work.dtype)
            if rate is None:
                return None
            seconds = work.flops / rate
        accessed = work.read_bytes + work.write_bytes
        if accessed:
            if profile.memory_bytes_per_s is None:
                return None
            seconds = max(seconds, accessed / profile.memory_bytes_per_s)
        return Estimate(max(seconds * 1e9, profile.kernel_floor_ns), self.name)
