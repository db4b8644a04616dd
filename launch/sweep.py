"""Plans for several jobs, and the hardware that they are planned for."""

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
_AS_ASSUMED = " as assumed"  # in the name of a profile that the command line changed
_MOST = 64  # plans of one sweep


def counts(text: str, name: str, most: int) -> list[int]:
    """`8,64,512`; ConfigError for anything but whole numbers from 0 to `most`."""
    try:
        return [parse_count(part.strip(), most) for part in text.split(",")]
    except ConfigError as error:
        raise ConfigError(f"--{name} {text}: {error}") from None


def points(axes: Axes) -> list[Point]:
    """Every combination, the last axis fastest. ConfigError for more than one table is good for."""
    found: list[Point] = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    if len(found) > _MOST:
        raise ConfigError(f"{len(found)} plans in one sweep: at most {_MOST}")
    return found


def sweep(axes: Axes, plan: Callable[[Point], Report]) -> Iterator[tuple[Point, Outcome]]:
    """The step of each plan, or why it does not fit into the memory."""
    for point in points(axes):
        try:
            yield point, plan(point).steps[0]
        except MemoryBudgetError as error:
            yield point, str(error).splitlines()[0]


def hardware(name: str, per_host: int, network: str, folder: Path) -> tuple[str, DeviceProfile]:
    """The profile of that name; with hosts of so many GPUs (0: its own) or another network, a file of it in `folder`.

    network: of one GPU, like 400Gb/s; "": its own. ConfigError for what is no rate.
    """
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
        raise ConfigError(f"--network {text}: write it like 400Gb/s or 50GB/s, of one GPU")
    return float(match[1]) * _PREFIX[match[2]] / (8 if match[3] == "b" else 1)


def assumed(profile: DeviceProfile, *more: str) -> str:
    """What plans take for granted of the machine, each with where it comes from."""
    origins = profile.origins
    parts = [f"{profile.name.removesuffix(_AS_ASSUMED)} ({origins.get('', 'not stated')})"]
    parts.append(f"hosts of {profile.ranks_per_host} ({origins.get('ranks_per_host', 'not stated')})")
    if profile.network_link is not None:
        rate = profile.network_link.bytes_per_s / 1e9
        parts.append(f"{rate:.3g} GB/s a GPU between hosts ({origins.get('network_link', 'not stated')})")
    return "assumed      " + "; ".join([*parts, *more])
