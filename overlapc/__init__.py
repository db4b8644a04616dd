"""overlapc: a `torch.compile` backend that hides FSDP/TP communication behind compute.

model = overlapc.fully_shard(model, mesh, param_dtype=torch.bfloat16)
step = torch.compile(model, backend="overlapc", options={"memory_budget": "70GiB"})
print(overlapc.report(step))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from overlapc.registration import register_with_torch

if TYPE_CHECKING:
    from overlapc import report
    from overlapc.compilation.traced_graph import compile_graph
    from overlapc.config import Config
    from overlapc.errors import (
        CompileError,
        ConfigError,
        MemoryBudgetError,
        OverlapcError,
        RanksDisagree,
        ScheduleError,
        ToolchainError,
    )
    from overlapc.parallel import adopt_fsdp2, fully_shard, no_sync, trust_modules
    from overlapc.report.step_metrics import metrics

__version__ = "0.1.0"

# Imported on first use: `import overlapc` costs nothing, and the command line responds before torch is imported.
_HOMES = {
    "Config": "overlapc.config",
    "compile_graph": "overlapc.compilation.traced_graph",
    **dict.fromkeys(("adopt_fsdp2", "fully_shard", "no_sync", "trust_modules"), "overlapc.parallel"),
    **dict.fromkeys(
        (
            "CompileError",
            "ConfigError",
            "MemoryBudgetError",
            "OverlapcError",
            "RanksDisagree",
            "ScheduleError",
            "ToolchainError",
        ),
        "overlapc.errors",
    ),
}
__all__ = [
    "CompileError",
    "Config",
    "ConfigError",
    "MemoryBudgetError",
    "OverlapcError",
    "RanksDisagree",
    "ScheduleError",
    "ToolchainError",
    "__version__",
    "adopt_fsdp2",
    "compile_graph",
    "fully_shard",
    "metrics",
    "no_sync",
    "report",
    "trust_modules",
]


def __getattr__(name: str) -> Any:
    if name == "report":
        return importlib.import_module("overlapc.report")
    if name == "metrics":
        return importlib.import_module("overlapc.report.step_metrics").metrics
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'overlapc' has no attribute {name!r}")


register_with_torch()
