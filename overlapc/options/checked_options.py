"""Checks options early: when the user calls `torch.compile`, and before the command line starts ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlapc.config import Config


def checked_options(options: Mapping[str, Any] | Config | None = None, mode: str | None = None) -> Config:
    """Return `Config.of(options, mode)`. ConfigError also for files that cannot be used, and for unknown passes."""
    config = Config.of(options, mode)
    if config.profile is not None:
        from overlapc.estimators.profiles.profile_file import load_profile

        load_profile(config.profile)
    if config.estimates is not None:
        from overlapc.report.earlier import users_estimator

        users_estimator(config.estimates, "")
    if config.passes or config.stop_after:
        from overlapc.passes.runner import parse_stop, select

        select(config.passes or ())
        if config.stop_after is not None:
            parse_stop(config.stop_after)
    return config
