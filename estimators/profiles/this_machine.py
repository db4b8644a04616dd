"""The profile of the machine that this process runs on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from overlapc.errors import CalibrationError, ConfigError, ToolchainError
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.profiles.processor import cpu_name
from overlapc.estimators.profiles.profile_file import load_profile
from overlapc.runtime.cache import KernelCache, content_key

_SUFFIX = ".json"
# Part of a GPU's name -> its stored profile; the first match counts (a GB200 is two B200s).
_OF_GPUS = {"H200": "h200-nvlink", "H100": "h100-nvlink", "A100": "a100", "B200": "b200"}
_OF_OTHER_GPUS = "h200-nvlink"  # the one with the most measurements


def profile_for(device_type: str, cache_dir: Path) -> DeviceProfile:
    """Return the profile for this machine, for use when the user named none.

    CUDA devices use the stored profile of their kind. A CPU is measured on first use and its profile cached
    under `cache_dir`; the other processes of the host wait for that, so that all use the same profile. If it cannot be
    measured or cached, the stored profile `cpu-gloo` is used.
    """
    if device_type != "cpu":
        return stored_profile(device_type)
    cache, key = KernelCache(cache_dir, "profiles"), _machine_key()
    try:
        path = cache.get_or_build(key, _SUFFIX, _measure, private=False)
        try:
            return load_profile(path)
        except ConfigError:  # written by another version of overlapc
            cache.drop(key, _SUFFIX)
            return load_profile(cache.get_or_build(key, _SUFFIX, _measure, private=False))
    except (CalibrationError, ConfigError, ToolchainError):
        return stored_profile(device_type)


def stored_profile(device_type: str) -> DeviceProfile:
    """Return the profile that overlapc ships for this machine's kind of device, without measuring."""
    if device_type == "cpu":
        return load_profile("cpu-gloo")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return load_profile(next((profile for part, profile in _OF_GPUS.items() if part in gpu), _OF_OTHER_GPUS))


def _measure(path: Path) -> None:
    """Measure this machine and write its profile to `path`."""
    from overlapc.estimators.calibration.quick_profile import measure  # imported late: needed once per machine

    path.write_text(" " * 2**16)  # so that a full disk fails before the measurement, which takes ten seconds
    path.write_text(json.dumps(measure(), indent=1))


def _machine_key() -> str:
    """Return the cache key of this machine's profile: it changes with everything that makes old numbers wrong."""
    version = "3"  # of what is measured
    return content_key("cpu-gloo", cpu_name(), str(os.cpu_count()), torch.__version__, version)
