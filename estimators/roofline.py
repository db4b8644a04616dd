"""Estimates of compute nodes from their FLOPs and bytes: the longer of arithmetic time and memory time.

If the profile has a curve for this kind of work (matmuls, attention, generated kernels), the rate is the one measured
for work of this size; else it is the profile's single number.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlapc.estimators.device import DeviceProfile
from overlapc.schedule.model import COMPUTE, Estimate, Kind, Node, Work


@dataclass(frozen=True)
class Roofline:
    """Estimates KERNEL and EXTERN nodes that have `work`; a node without `work` is unknown, not free."""

    profile: DeviceProfile

    @property
    def name(self) -> str:
        return f"roofline {self.profile.name}"

    def estimate(self, node: Node) -> Estimate | None:
        work, profile = node.work, self.profile
        if work is None or node.kind not in COMPUTE:
            return None
        seconds = 0.0
        if work.flops:
            rate = self._flops_per_s(node, work)
            if rate is None:
                return None
            seconds = work.flops / rate
        accessed = work.read_bytes + work.write_bytes
        if accessed:
            moving_ns = profile.generated_ns(work.form, accessed) if _is_generated(node) else None
            if moving_ns is None:
                if profile.memory_bytes_per_s is None:
                    return None
                moving_ns = accessed / profile.memory_bytes_per_s * 1e9
            seconds = max(seconds, moving_ns / 1e9)
        return Estimate(max(seconds * 1e9, profile.kernel_floor_ns), self.name)

    def _flops_per_s(self, node: Node, work: Work) -> float | None:
        profile = self.profile
        if _is_generated(node):
            # Generated loops run on the vector units for every dtype; products and attention do not.
            return profile.flops_per_s.get("vector") or profile.rate(work.dtype)
        return profile.curve_rate(_calls_like(node), work.dtype, work.flops) or profile.rate(work.dtype)


def curve_of(node: Node, profile: DeviceProfile) -> tuple[str, int] | None:
    """Return the profile's curve that determines a node's estimate, and the node's size on it; None if none does."""
    work, estimate = node.work, Roofline(profile).estimate(node)
    if work is None or estimate is None:
        return None
    if _is_generated(node):
        size = work.read_bytes + work.write_bytes
        name = next((each for each in (f"generated.{work.form}", "generated") if profile.curves.get(each)), None)
        decides_ns = profile.generated_ns(work.form, size) if name is not None and size else None
    else:
        size, name = work.flops, profile.curve_name(_calls_like(node), work.dtype)
        rate = profile.curve_rate(_calls_like(node), work.dtype, size) if name is not None else None
        decides_ns = None if rate is None else size / rate * 1e9
    # An estimate longer than the curve's time comes from the floor or from the roofline's other term, not the curve.
    # The tolerance is for rounding.
    return None if name is None or decides_ns is None or decides_ns < estimate.ns * (1 - 1e-9) else (name, size)


def _is_generated(node: Node) -> bool:
    return node.kind is Kind.KERNEL and node.op != "product" and "attention" not in node.op


def _calls_like(node: Node) -> str:
    """Return the name of the curve for this kind of work, without the dtype."""
    if "attention" not in node.op:
        return "matmul"
    return "attention_backward" if node.op.endswith("backward") else "attention"
