"""Profile files: JSON in `estimators/profiles/`, or anywhere else.

Every quantity is an object `{"value": ..., "origin": "..."}`; the origin says on which machine it was measured, or that
it was not measured. Besides `quantities` a file may have `tables` of collectives, `curves` of achieved rates, and
`facts`: further measurements for human readers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from overlapc import documents
from overlapc.errors import ConfigError, shown, unknown_name
from overlapc.estimators.device import IDEAL, DeviceProfile, HostCosts, Link, Slowdown, Table

FORMAT = 1  # "overlapc_profile" of a file; incremented when code that reads the old format would misread the new one
_BESIDE_QUANTITIES = {"name", "flops_per_s", "tables", "curves", "origins"}
_RawPoints = tuple[tuple[float, float], ...]
PROFILES = Path(__file__).parent


def load_profile(name_or_path: str | Path) -> DeviceProfile:
    """Load a profile by name (`h200-nvlink`) or from a JSON file. Raise ConfigError if it is missing or malformed."""
    path = profile_path(name_or_path)
    what = f"device profile {path} is not in the expected form"
    data = documents.from_json(documents.read_text(path), dict[str, Any], what)
    return profile_from_json(data, what)


def profile_path(name_or_path: str | Path) -> Path:
    """Return the file of a profile. Raise ConfigError for an unknown name."""
    path = Path(name_or_path)
    if path.suffix != ".json":
        path = PROFILES / f"{name_or_path}.json"
        if not path.is_file():
            known = [found.stem for found in PROFILES.glob("*.json")]
            raise ConfigError(unknown_name("device profile", str(name_or_path), known))
    return path


class _Quantity(msgspec.Struct):
    value: Any
    origin: str


class _Curve(msgspec.Struct):
    curve: str
    points: _RawPoints


class _Table(msgspec.Struct):
    collective: str
    ranks: int
    points: _RawPoints
    dtype: str = ""


class _File(msgspec.Struct):
    name: str
    quantities: dict[str, _Quantity]
    overlapc_profile: int = FORMAT  # older files have no such field
    origin: str = ""
    tables: tuple[_Table, ...] = ()
    curves: tuple[_Curve, ...] = ()


def profile_from_json(data: Mapping[str, Any], what: str = "device profile") -> DeviceProfile:
    """Build a profile from the JSON object of a profile file. Raise ConfigError, starting with `what`, if malformed."""
    file = documents.from_data(data, _File, what)
    if file.overlapc_profile != FORMAT:
        raise ConfigError(
            f"{what}: its format is version {file.overlapc_profile}, but this overlapc reads version {FORMAT}"
        )
    values = {key: entry.value for key, entry in file.quantities.items()}
    origins = {"": file.origin, **{key: entry.origin for key, entry in file.quantities.items()}}
    flops = {key.partition(".")[2]: values.pop(key) for key in list(values) if key.startswith("flops_per_s.")}
    known = {field.name for field in dataclasses.fields(DeviceProfile)} - _BESIDE_QUANTITIES
    for key in values:
        if key not in known:
            raise ConfigError(f"{what}: {unknown_name('quantity', key, known)}")
    for kind, entries in ((HostCosts, [values.get("host")]), (Slowdown, _values(values.get("slowdowns")))):
        names = {field.name for field in dataclasses.fields(kind)}
        for key in (key for entry in entries if isinstance(entry, dict) for key in entry):
            if key not in names:
                raise ConfigError(f"{what}: {unknown_name('quantity', key, names)}")
    for key in ("ranks_per_host", "multiprocessors"):
        if isinstance(values.get(key), float) and values[key].is_integer():  # a median over ranks
            values[key] = int(values[key])
    try:
        if "slowdowns" in values:
            values["slowdowns"] = {name: _slowdown(entry) for name, entry in values["slowdowns"].items()}
        if "clock_by_utilization" in values:
            values["clock_by_utilization"] = _points(
                (max(1, share), clock) for share, clock in values["clock_by_utilization"]
            )
        if "throttle" in values:
            values["throttle"] = {kind: _points(points) for kind, points in values["throttle"].items()}
        tables = [{**msgspec.structs.asdict(each), "points": _points(each.points)} for each in file.tables]
        curves = {each.curve: _points(each.points) for each in file.curves}
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{what}: {shown(str(error))}") from None
    whole = {**values, "name": file.name, "flops_per_s": flops, "tables": tables, "curves": curves, "origins": origins}
    return documents.from_data(whole, DeviceProfile, what)


def _values(entries: Any) -> Sequence[Any]:
    return list(entries.values()) if isinstance(entries, dict) else ()


def _slowdown(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the slowdown factors raised to at least 1: below 1 (a speedup by a collective) is measurement noise."""
    found: dict[str, Any] = {}
    for key, factor in entry.items():
        if isinstance(factor, list | tuple):
            found[key] = tuple((size, max(1.0, times)) for size, times in _points(factor))
        else:
            found[key] = max(1.0, float(factor))
    return found


def _points(listed: Iterable[tuple[float, float]]) -> tuple[tuple[int, float], ...]:
    """Return the points in ascending order. Raise ValueError if a size occurs twice."""
    points = tuple(sorted((int(size), float(value)) for size, value in listed))
    for (low, _), (high, _) in itertools.pairwise(points):
        if low == high:
            raise ValueError(f"two points of size {low}")
    return points


def link_to_json(link: Link) -> dict[str, Any]:
    """Return a link in the form of a profile file."""
    data: dict[str, Any] = {"bytes_per_s": link.bytes_per_s, "step_ns": link.step_ns}
    if link.protocols:
        data["protocols"] = [asdict(each) for each in link.protocols]
    return data


def table_from_json(entry: Mapping[str, Any]) -> Table:
    """Build a table from its form in a profile file."""
    return Table(entry["collective"], int(entry["ranks"]), _points(entry["points"]), str(entry.get("dtype", "")))


def profile_to_json(profile: DeviceProfile) -> dict[str, Any]:
    """Return the JSON object from which `profile_from_json` builds an equal profile."""
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
    if profile.clock_by_utilization:
        values["clock_by_utilization"] = [list(point) for point in profile.clock_by_utilization]
    if profile.host is not None:
        values["host"] = asdict(profile.host)
    for key in ("host_link", "network_link", "copy_link"):
        link = getattr(profile, key)
        if link is not None:
            values[key] = link_to_json(link)
    if profile.slowdowns:
        values["slowdowns"] = {
            name: {key: factor for key, factor in asdict(each).items() if factor is not None and factor != ()}
            for name, each in profile.slowdowns.items()
        }
    return {
        "overlapc_profile": FORMAT,
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
