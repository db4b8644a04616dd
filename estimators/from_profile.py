"""Estimates from a device profile alone, without measurements on this machine or times of an earlier run."""

from __future__ import annotations

from overlapc.estimators.base import FirstKnown
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.nccl import AnalyticCollectives, MeasuredCollectives
from overlapc.estimators.roofline import Roofline


def from_profile(profile: DeviceProfile) -> FirstKnown:
    """Return a chain that uses the profile's tables of collectives, then models with the profile's rates."""
    return FirstKnown((MeasuredCollectives(profile), AnalyticCollectives(profile), Roofline(profile)))
