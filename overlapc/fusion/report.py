"""The report of fusion: kernels that were fused or share a launch, and the reason for each refusal."""

from __future__ import annotations

from dataclasses import dataclass, field

from overlapc.fusion.merge import Refusal


@dataclass(slots=True)
class FusionReport:
    """Fusions and refusals, by op names."""

    fused: list[tuple[str, str, int]] = field(default_factory=list)  # first, second, bytes saved
    combined: list[tuple[str, str]] = field(default_factory=list)  # first, second of one launch
    refused: dict[tuple[str, str], Refusal] = field(default_factory=dict)  # (first, second) -> why they stay apart
    kernel_of: dict[str, str] = field(default_factory=dict)  # op -> the fused op that contains it

    def __str__(self) -> str:
        lines = [f"fused {a} + {b}: saves {saved} bytes" for a, b, saved in self.fused]
        lines += [f"one launch {a} + {b}" for a, b in self.combined]
        lines += [f"apart {a} | {b}: {refusal.reason}" for (a, b), refusal in self.refused.items()]
        return "\n".join(lines)
