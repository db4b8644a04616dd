"""The device profile that a compilation uses."""

from __future__ import annotations

import json
from collections.abc import Collection

import torch

from overlapc.config import Config
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.profiles.profile_file import load_profile, profile_to_json
from overlapc.estimators.profiles.this_machine import profile_for, stored_profile
from overlapc.runtime.deterministic import deterministic


def profile_of(config: Config, device_types: Collection[str]) -> DeviceProfile:
    """Return the profile that `config` names, else this machine's profile for the devices of a graph."""
    if config.profile is not None:
        return load_profile(config.profile)
    device_type = "cuda" if "cuda" in device_types else "cpu"
    if torch.are_deterministic_algorithms_enabled():  # a profile measured on this machine differs from run to run
        return stored_profile(device_type)
    return profile_for(device_type, config.cache_dir)


def profile_text(config: Config, device_types: Collection[str]) -> str:
    """Return the whole profile as text, for a fingerprint."""
    with deterministic(config.deterministic):  # with `deterministic`, nothing is measured on this machine
        return json.dumps(profile_to_json(profile_of(config, device_types)))
