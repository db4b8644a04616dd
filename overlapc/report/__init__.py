"""Reports: what was compiled, which communication is hidden, which is not, and why.

The package itself can be called: `overlapc.report(step)` returns the report of all graphs that this process compiled.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from overlapc.report.measure import Measurement, measure, report_with_trace
from overlapc.report.model import CollectiveRow, GraphRecord, Measured, PassRow, Plan, Span, StepRecord
from overlapc.report.record import NothingCompiled, Report, load, report_of_process

__all__ = [
    "CollectiveRow",
    "GraphRecord",
    "Measured",
    "Measurement",
    "NothingCompiled",
    "PassRow",
    "Plan",
    "Report",
    "Span",
    "StepRecord",
    "load",
    "measure",
    "report_of_process",
    "report_with_trace",
]


class _CallablePackage(ModuleType):
    """A module that can be called, so that `overlapc.report` is both a function and the package of the renderers."""

    def __call__(self, compiled: Any = None) -> Report:
        """Return the report of this process. With `compiled`, raise NothingCompiled unless a graph was compiled."""
        report = report_of_process()
        if compiled is not None and not report.steps[0].graphs:
            raise NothingCompiled(
                "nothing was compiled with backend='overlapc' in this process yet; run one step before the report"
            )
        return report


sys.modules[__name__].__class__ = _CallablePackage
