"""Plans several jobs in one sweep, and the hardware that they are planned for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from overlapc.errors import ConfigError, MemoryBudgetError
from overlapc.estimators.device import DeviceProfile, Link
from overlapc.estimators.profiles.profile_file import load_profile, profile_to_json
from overlapc.report.plans import Axes, Outcome, Point
from overlapc.report.record import Report
from overlapc.units import parse_count

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(b|B)/s")
_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_AS_ASSUMED = " as assumed"  # suffix of the name of a profile that command line options changed
MOST_RANKS = 2**17  # of one plan: torch stores a list of the ranks of every group
_MOST = 64  # limit on the plans of one sweep


def counts(text: str, name: str, most: int) -> list[int]:
    """Parse `8,64,512`; ConfigError for anything except whole numbers from 0 to `most`."""
    try:
        return [parse_count(part.strip(), most) for part in text.split(",")]
    except ConfigError as error:
        raise ConfigError(f"--{name} {text}: {error}") from None


def points(axes: Axes) -> list[Point]:
    """Return all combinations of the axes' values, the last axis fastest. ConfigError for more than 64."""
    found: list[Point] = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    if len(found) > _MOST:
        raise ConfigError(f"{len(found)} plans in one sweep: at most {_MOST}")
    return found


def sweep(axes: Axes, plan: Callable[[Point], Report]) -> Iterator[tuple[Point, Outcome]]:
    """Yield each point with its planned step, or with the reason why it does not fit into memory."""
    for point in points(axes):
        try:
            yield point, plan(point).steps[0]
        except MemoryBudgetError as error:
            yield point, str(error).splitlines()[0]


def hardware(name: str, per_host: int, network: str, folder: Path) -> tuple[str, DeviceProfile]:
    """Return the name or file of a profile, and the profile. If it is changed, it is written to a file in `folder`.

    per_host: GPUs per host; 0 leaves the profile's. network: rate of one GPU's network, like 400Gb/s; "" leaves the
    profile's. ConfigError for a number of GPUs or a rate that cannot be.
    """
    if not 0 <= per_host <= MOST_RANKS:
        raise ConfigError(f"--gpus-per-host {per_host}: write a number from 1 to {MOST_RANKS:,}")
    profile = load_profile(name)
    if not per_host and not network:
        return name, profile
    origins = dict(profile.origins)
    if per_host:
        profile, origins["ranks_per_host"] = replace(profile, ranks_per_host=per_host), "--gpus-per-host"
    if network:
        base = profile.network_link or Link(1.0, 5000.0)
        profile = replace(profile, network_link=replace(base, bytes_per_s=_rate(network)))
        origins["network_link"] = f"--network {network}"
    profile = replace(profile, name=f"{profile.name}{_AS_ASSUMED}", origins=origins)
    path = folder / "assumed.json"
    path.write_text(json.dumps(profile_to_json(profile)))
    return str(path), profile


def _rate(text: str) -> float:
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"--network {text}: write the rate of one GPU's network like 400Gb/s or 50GB/s")
    return float(match[1]) * _PREFIX[match[2]] / (8 if match[3] == "b" else 1)


def assumed(profile: DeviceProfile, *more: str) -> str:
    """Return the line that lists the assumptions of plans about the machine, each with its source, and `more`."""
    origins = profile.origins
    parts = [f"{profile.name.removesuffix(_AS_ASSUMED)} ({origins.get('', 'not stated')})"]
    parts.append(f"{profile.ranks_per_host} GPUs per host ({origins.get('ranks_per_host', 'not stated')})")
    if profile.network_link is not None:
        rate = profile.network_link.bytes_per_s / 1e9
        parts.append(f"{rate:.3g} GB/s per GPU between hosts ({origins.get('network_link', 'not stated')})")
    return "assumed      " + "; ".join([*parts, *more])
