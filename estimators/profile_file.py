"""Profile files: JSON in `estimators/profiles/`, or anywhere else.

Every quantity is an object `{"value": ..., "origin": "..."}`; the origin says on which machine it was measured, or that
it was not. Beside `quantities` a file may hold `tables` of collectives, `curves` of achieved rates, and `facts`: more
measurements, for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from overlapc.errors import ConfigError, unknown_name
from overlapc.estimators.device import (
    IDEAL,
    DeviceProfile,
    HostCosts,
    Link,
    Protocol,
    Slowdown,
    Table,
)

PROFILES = Path(__file__).parent / "profiles"


def load_profile(name_or_path: str | Path) -> DeviceProfile:
    """A profile by name (`h200-nvlink`) or JSON file. ConfigError when it cannot be used."""
    path = Path(name_or_path)
    if path.suffix != ".json":
        path = PROFILES / f"{name_or_path}.json"
        if not path.is_file():
            known = [found.stem for found in PROFILES.glob("*.json")]
            raise ConfigError(unknown_name("device profile", str(name_or_path), known))
    try:
        return profile_from_json(json.loads(path.read_text()))
    except OSError as error:
        raise ConfigError(f"device profile {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"device profile {path} is not in the expected form: {error!r}") from None


def profile_from_json(data: Mapping[str, Any]) -> DeviceProfile:
    """The profile that the object of a profile file describes. KeyError, TypeError or ValueError if it is none."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {"": str(data.get("origin", ""))}
    for key, entry in data["quantities"].items():
        values[key], origins[key] = entry["value"], entry["origin"]
    flops = {}
    for key in [key for key in values if key.startswith("flops_per_s.")]:
        flops[key.partition(".")[2]] = float(values.pop(key))
    for key in ("host_link", "network_link"):
        if key in values:
            values[key] = _link(values[key])
    tables = [table_from_json(entry) for entry in data.get("tables", ())]
    slowdowns = {name: _slowdown(entry) for name, entry in values.pop("slowdowns", {}).items()}
    if "host" in values:
        values["host"] = HostCosts(**{kind: float(ns) for kind, ns in values["host"].items()})
    if "heat" in values:
        values["heat"] = _points(values["heat"])
    if "throttle" in values:
        values["throttle"] = {kind: _points(points) for kind, points in values["throttle"].items()}
    curves = {str(entry["curve"]): _points(entry["points"]) for entry in data.get("curves", ())}
    return DeviceProfile(
        name=str(data["name"]),
        flops_per_s=flops,
        tables=tuple(tables),
        curves=curves,
        slowdowns=slowdowns,
        origins=origins,
        **values,
    )


def _slowdown(entry: Mapping[str, Any]) -> Slowdown:
    found: dict[str, Any] = {}
    for key, factor in entry.items():
        if isinstance(factor, list | tuple):
            found[key] = tuple((size, max(1.0, times)) for size, times in _points(factor))
        else:
            found[key] = max(1.0, float(factor))
    return Slowdown(**found)


def _link(entry: Mapping[str, Any]) -> Link:
    protocols = tuple(
        Protocol(float(each["share"]), float(each["base_ns"]), float(each["step_ns"]))
        for each in entry.get("protocols", ())
    )
    return Link(float(entry["bytes_per_s"]), float(entry["step_ns"]), protocols)


def link_to_json(link: Link) -> dict[str, Any]:
    """What a profile file holds of a link."""
    data: dict[str, Any] = {"bytes_per_s": link.bytes_per_s, "step_ns": link.step_ns}
    if link.protocols:
        data["protocols"] = [asdict(each) for each in link.protocols]
    return data


def table_from_json(entry: Mapping[str, Any]) -> Table:
    """A table as a profile file holds it."""
    return Table(entry["collective"], int(entry["ranks"]), _points(entry["points"]), str(entry.get("dtype", "")))


def _points(listed: Any) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((int(size), float(value)) for size, value in listed))


def profile_to_json(profile: DeviceProfile) -> dict[str, Any]:
    """What `profile_from_json` reads back to an equal profile."""
    values: dict[str, Any] = {f"flops_per_s.{dtype}": rate for dtype, rate in profile.flops_per_s.items()}
    for key in (
        "memory_bytes_per_s", "kernel_floor_ns", "kernel_gap_ns", "launch_ns", "synchronous",
        "multiprocessors", "collectives_wait_for_kernels", "collective_floor_ns", "ranks_per_host",
        "collective_slowdown", "coalesced_tensor_ns", "collective_gap_ns", "collective_load",
    ):  # fmt: skip
        value = getattr(profile, key)
        if key in profile.origins or value != getattr(IDEAL, key):
            values[key] = value
    if profile.throttle:
        values["throttle"] = {kind: [list(point) for point in points] for kind, points in profile.throttle.items()}
    if profile.heat:
        values["heat"] = [list(point) for point in profile.heat]
    if profile.host is not None:
        values["host"] = asdict(profile.host)
    for key in ("host_link", "network_link"):
        link = getattr(profile, key)
        if link is not None:
            values[key] = link_to_json(link)
    if profile.slowdowns:
        values["slowdowns"] = {
            name: {key: factor for key, factor in asdict(each).items() if factor is not None and factor != ()}
            for name, each in profile.slowdowns.items()
        }
    return {
        "name": profile.name,
        "origin": profile.origins.get("", ""),
        "quantities": {
            key: {"value": value, "origin": profile.origins.get(key, "not stated")} for key, value in values.items()
        },
        "tables": [
            {
                "collective": table.collective,
                "ranks": table.ranks,
                "dtype": table.dtype,
                "points": [list(point) for point in table.points],
            }
            for table in profile.tables
        ],
        "curves": [
            {"curve": name, "points": [list(point) for point in points]} for name, points in profile.curves.items()
        ],
    }
