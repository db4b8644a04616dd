"""Render the results of kernels.py as a table and a summary."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from benchmarks.kernel_subject import TUNED

SHOWN = ("overlapc", TUNED, "inductor", "eager")
NOT_CHECKED = "not checked"


@dataclass
class Result:
    """The results of one case; times are medians in microseconds, by system."""

    case: str
    check: str
    least_bytes: int
    matmul_bound: bool
    hidden_us: dict[str, float]
    launched_us: dict[str, float]
    host_us: dict[str, float]  # of forward + backward, for problems with gradients
    host_least_us: dict[str, float]  # the same, the smallest sample, which other work on the host disturbs least
    profile: dict[str, list[tuple[str, float]]]
    tuned: list[str]  # result of measuring block sizes, one line per graph

    def speed(self, times: dict[str, float], other: str = "inductor") -> float | None:
        """Return how many times as fast as `other` overlapc is; None if either was not timed."""
        if "overlapc" not in times or other not in times:
            return None
        return times[other] / times["overlapc"]


def geometric_mean(numbers: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, numbers)) / len(numbers)) if numbers else float("nan")


def table(results: Sequence[Result], bandwidth: float | None) -> str:
    systems = [system for system in SHOWN if any(system in result.hidden_us for result in results)]
    headers = ["case"]
    if bandwidth is not None:
        headers += [f"{system} share" for system in systems if system != "eager"]
    headers += [f"{system} us" for system in systems] + ["x inductor", "x eager", "check"]
    if bandwidth is not None:
        headers.insert(-1, "launched x ind.")
    rows = []
    for result in results:
        row: list[Any] = [result.case]
        if bandwidth is not None:
            row += [share(result, system, bandwidth) for system in systems if system != "eager"]
        row += [result.hidden_us.get(system) for system in systems]
        row += [result.speed(result.hidden_us), result.speed(result.hidden_us, "eager")]
        if bandwidth is not None:
            row.append(result.speed(result.launched_us))
        rows.append([*(_shown(item) for item in row), result.check])
    return tabulate(rows, headers=headers)


def _shown(item: Any) -> str:
    if item is None:
        return "-"
    if isinstance(item, str):
        return item
    return f"{item:.1f}" if item >= 10 else f"{item:.2f}"


def share(result: Result, system: str, bandwidth: float) -> float | None:
    """Return the rate of the least bytes over the hidden time, in percent of a device copy's."""
    if system not in result.hidden_us:
        return None
    return 100 * result.least_bytes / (result.hidden_us[system] / 1e6) / bandwidth


def summary(results: Sequence[Result], bandwidth: float | None) -> str:
    lines = [f"{len(results)} cases"]
    if bandwidth is not None:
        for system in SHOWN:
            of_all = [each for result in results if (each := share(result, system, bandwidth)) is not None]
            bound = [
                each
                for result in results
                if not result.matmul_bound and (each := share(result, system, bandwidth)) is not None
            ]
            if not of_all:
                continue
            lines.append(
                f"{system}: {geometric_mean(of_all):.1f}% of copy bandwidth in geometric mean"
                f" ({geometric_mean(bound):.1f}% without the matmuls)"
            )
    for other in ("inductor", "eager"):
        for label, pick in (("hidden", "hidden_us"), ("with launches", "launched_us")):
            speeds = [each for result in results if (each := result.speed(getattr(result, pick), other)) is not None]
            if speeds:
                lines.append(
                    f"times {other}'s speed, {label}: {geometric_mean(speeds):.3f} in geometric mean,"
                    f" worst {min(speeds):.2f}"
                )
    slow = [
        (each, result.case)
        for result in results
        if (each := result.speed(result.hidden_us)) is not None and each < 0.95
    ]
    lines.append(
        "below 0.95 of inductor: " + (", ".join(f"{name} {each:.2f}" for each, name in sorted(slow)) or "none")
    )
    gains = {
        result.case: result.hidden_us["overlapc"] / result.hidden_us[TUNED]
        for result in results
        if {"overlapc", TUNED} <= set(result.hidden_us)
    }
    if gains:
        changed = [f"{name} {gain:.2f}" for name, gain in sorted(gains.items(), key=lambda item: -item[1])]
        lines.append(
            f"with measured block sizes: {geometric_mean(list(gains.values())):.3f} times as fast in geometric mean;"
            f" most {', '.join(changed[:8])}; least {changed[-1]}"
        )
    lines += _host_lines(results)
    wrong = [f"{result.case}: {result.check}" for result in results if result.check not in ("ok", NOT_CHECKED)]
    lines += dict.fromkeys(f"{result.case}: {line}" for result in results for line in result.tuned)
    unchecked = any(result.check == NOT_CHECKED for result in results)
    lines.append("checks: " + ("; ".join(dict.fromkeys(wrong)) or (NOT_CHECKED if unchecked else "all ok")))
    return "\n".join(lines)


_HOST_FORMAT = ("", *2 * (".0f", ".0f", ".0f", ".2f"))


def _host_lines(results: Sequence[Result]) -> list[str]:
    """Return lines about host time of forward + backward by problem: medians and smallest samples."""
    by_problem = {re.sub(" (forward|backward|forward \\+ backward)$", "", each.case): each for each in results}
    rows: list[list[Any]] = []
    for name, result in by_problem.items():
        if {"overlapc", "inductor"} <= set(result.host_us):
            row: list[Any] = [name]
            for times in (result.host_us, result.host_least_us):
                row += [times["overlapc"], times["inductor"], times.get("eager"), times["overlapc"] / times["inductor"]]
            rows.append(row)
    if not rows:
        return []
    headers = ["host, us", "overlapc", "inductor", "eager", "ratio"]
    lines = [tabulate(rows, headers=[*headers, *(f"least {each}" for each in headers[1:])], floatfmt=_HOST_FORMAT)]
    for label, at in (("", 4), (", least samples", 8)):
        ratios = [row[at] for row in rows]
        lines.append(
            f"host time of forward + backward{label}: {statistics.median(row[at - 3] for row in rows):.0f} us,"
            f" {geometric_mean(ratios):.2f} of inductor's in geometric mean over {len(rows)} (worst {max(ratios):.2f})"
        )
    return lines
