"""Converts the options in `Config` to the `Context` of passes."""

from __future__ import annotations

from overlapc.codegen.copies import peak_with_pools
from overlapc.config import Config
from overlapc.estimators.base import Estimator
from overlapc.estimators.device import DeviceProfile
from overlapc.passes.base import Context


def context_of(config: Config, profile: DeviceProfile, estimator: Estimator | None) -> Context:
    """Return the passes' context. `estimator` estimates the collectives that passes create; None leaves them without
    a time."""
    return Context(
        profile=profile,
        passes=config.passes,
        peak_increase=config.peak_increase,
        reorder_collectives=config.reorder_collectives,
        overlap_margin=config.overlap_margin,
        effort=config.search_effort,
        stop_after=config.stop_after,
        estimate=None if estimator is None else estimator.estimate,
        cache_dir=config.cache_dir,
        verify=config.verify,
        check_memory=config.check_memory,
        peak_of=peak_with_pools,
    )
