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
# Part of a GPU's name -> the stored profile of its kind; the first that is found counts (a GB200 is two B200s).
_OF_GPUS = {"H200": "h200-nvlink", "H100": "h100-nvlink", "A100": "a100", "B200": "b200"}
_OF_OTHER_GPUS = "h200-nvlink"  # the one with the most measurements


def profile_for(device_type: str, cache_dir: Path) -> DeviceProfile:
    """The profile to use on this machine when the user named none.

    CUDA devices use the stored profile of their kind. CPUs are measured on first use and the numbers kept
    under `cache_dir`; the processes of one host wait for the first of them, so that all use the same. Where
    measuring or keeping it is impossible the stored `cpu-gloo` default is used.
    """
    if device_type != "cpu":
        return stored_profile(device_type)
    cache, key = KernelCache(cache_dir, "profiles"), _machine_key()
    try:
        path = cache.get_or_build(key, _SUFFIX, _measure, private=False)
        try:
            return load_profile(path)
        except ConfigError:  # of another version
            cache.drop(key, _SUFFIX)
            return load_profile(cache.get_or_build(key, _SUFFIX, _measure, private=False))
    except (CalibrationError, ConfigError, ToolchainError):
        return stored_profile(device_type)


def stored_profile(device_type: str) -> DeviceProfile:
    """The profile that overlapc brings for devices of this machine: nothing is measured."""
    if device_type == "cpu":
        return load_profile("cpu-gloo")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return load_profile(next((profile for part, profile in _OF_GPUS.items() if part in gpu), _OF_OTHER_GPUS))


def _measure(path: Path) -> None:
    """Measures this machine and writes its profile."""
    from overlapc.estimators.calibration.quick_profile import measure  # once a machine

    path.write_text(" " * 2**16)  # so that a full disk is noticed before ten seconds are spent
    path.write_text(json.dumps(measure(), indent=1))


def _machine_key() -> str:
    """Changes with anything that makes old numbers wrong."""
    version = "3"  # of what is measured
    return content_key("cpu-gloo", cpu_name(), str(os.cpu_count()), torch.__version__, version)
