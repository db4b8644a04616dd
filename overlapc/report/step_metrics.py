"""`overlapc.metrics(step, tokens=...)`: the figures of a training step, for a logger."""

from __future__ import annotations

from typing import Any

import torch

from overlapc.report import report_of_process
from overlapc.report.held_memory import step_peak_bytes
from overlapc.report.ledger import utilization
from overlapc.report.limiting_factor import Spent
from overlapc.report.record import NothingCompiled
from overlapc.runtime.steps import STEPS


def metrics(compiled: Any = None, *, tokens: int = 0) -> dict[str, float]:
    """Return the known figures of a step by name, for `SummaryWriter.add_scalar`, `wandb.log` and similar loggers.

    Measured, from the third step on: step_ms, the median time of the last steps by the host's clock from one optimizer
    step to the next; tokens_per_s; utilization, the fraction of step_ms that the matrix products, recomputed ones
    included, would take at the profile's rates. Predicted: predicted_ms, exposed_ms, host_ms, bound_ms (the lower
    bound), peak_gib. allocated_gib is the peak of torch's allocator.

    tokens: number of tokens of one step on all ranks; reports then show tokens/s, too.
    compiled: if given, raise NothingCompiled unless a graph was compiled.
    """
    if tokens:
        STEPS.tokens = tokens  # for the report
    (step,) = report_of_process().steps
    if compiled is not None and not step.graphs:
        raise NothingCompiled("nothing was compiled with backend='overlapc' in this process yet; run one step first")
    found: dict[str, float] = {}
    if step.called:
        found["predicted_ms"] = step.step_ns / 1e6
        found["exposed_ms"] = Spent.of(step).exposed_ns / 1e6
        found["bound_ms"] = step.lower_bound_ns / 1e6
        found["peak_gib"] = step_peak_bytes(step) / 2**30
        if step.host_ns is not None:
            found["host_ms"] = step.host_ns / 1e6
    if step.clock_ns:
        found["step_ms"] = step.clock_ns / 1e6
        if step.tokens:
            found["tokens_per_s"] = step.tokens / step.clock_ns * 1e9
        share = utilization(step)
        if share is not None:
            found["utilization"] = share * step.step_ns / step.clock_ns
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found
