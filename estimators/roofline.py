"""Compute nodes from their FLOPs and bytes: the slower of arithmetic and memory, at achieved rates.

Where the profile has a curve for this kind of work (matmuls, attention, generated kernels), the rate is the one that
work of this size was measured to achieve; else it is the profile's one number.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlapc.estimators.device import DeviceProfile
from overlapc.schedule.model import Estimate, Kind, Node, Work


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
            rate = self._flops_per_s(node, work)
            if rate is None:
                return None
            seconds = work.flops / rate
        accessed = work.read_bytes + work.write_bytes
        if accessed:
            generated = node.kind is Kind.KERNEL and node.op != "product"
            moving_ns = profile.generated_ns(work.form, accessed) if generated else None
            if moving_ns is None:
                if profile.memory_bytes_per_s is None:
                    return None
                moving_ns = accessed / profile.memory_bytes_per_s * 1e9
            seconds = max(seconds, moving_ns / 1e9)
        return Estimate(max(seconds * 1e9, profile.kernel_floor_ns), self.name)

    def _flops_per_s(self, node: Node, work: Work) -> float | None:
        profile = self.profile
        if node.kind is Kind.KERNEL and node.op != "product":
            # Generated kernels run on the vector units, whatever dtype they load and store; products do not.
            return profile.flops_per_s.get("vector") or profile.rate(work.dtype)
        curve = "matmul"
        if "attention" in node.op:
            curve = "attention_backward" if node.op.endswith("backward") else "attention"
        return profile.curve_rate(curve, work.dtype, work.flops) or profile.rate(work.dtype)
