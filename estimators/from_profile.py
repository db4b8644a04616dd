"""Estimates from a device profile alone: without a machine to measure on and without an earlier run."""

from __future__ import annotations

from overlapc.estimators.base import FirstKnown
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.nccl import AnalyticCollectives, MeasuredCollectives
from overlapc.estimators.roofline import Roofline


def from_profile(profile: DeviceProfile) -> FirstKnown:
    """The profile's tables of collectives, then models at the rates that it gives."""
    return FirstKnown((MeasuredCollectives(profile), AnalyticCollectives(profile), Roofline(profile)))
