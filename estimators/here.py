"""Which profile stands for the machine that this process runs on."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import filelock
import torch

from overlapc.errors import CalibrationError, ConfigError
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.effort import MEASURING_S
from overlapc.estimators.processor import cpu_name
from overlapc.estimators.profile_file import load_profile


def profile_for(device_type: str, cache_dir: Path) -> DeviceProfile:
    """The profile to use on this machine when the user named none.

    CUDA devices use the one that was measured on H200s. CPUs are measured on first use and the numbers kept
    under `cache_dir`; the processes of one host wait for the first of them, so that all use the same. Where
    measuring is impossible the stored `cpu-gloo` default is used.
    """
    if device_type != "cpu":
        return load_profile("h200-nvlink")
    path = cache_dir / f"profile-cpu-gloo-{_machine_key()}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock", timeout=MEASURING_S + 30):
            return _kept(path) or _measured(path)
    except (CalibrationError, OSError, filelock.Timeout):
        return load_profile("cpu-gloo")


def _kept(path: Path) -> DeviceProfile | None:
    """What an earlier process measured; None if there is nothing, or a file that a full disk or a crash cut off."""
    try:
        return load_profile(path) if path.is_file() else None
    except ConfigError:
        return None


def _measured(path: Path) -> DeviceProfile:
    """What this machine is like, kept in `path`."""
    from overlapc.estimators.calibrate import measure  # once a machine

    text = json.dumps(measure(), indent=1)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(path)  # a reader sees all of it or nothing
    return load_profile(path)


def _machine_key() -> str:
    """Changes with anything that makes old numbers wrong."""
    parts = (cpu_name(), str(os.cpu_count()), torch.__version__, "3")  # last: version of what is measured
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]
