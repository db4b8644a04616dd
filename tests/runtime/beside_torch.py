"""Run scenarios with functions compiled by overlapc and by AOTAutograd alone, and compare what they observe.

A scenario compiles a function, calls it at least three times (the first call always runs in AOTAutograd's wrapper) and
returns its observations. Ops are not generated (`native=False`), because these tests are about the code around graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from overlapc.backend import overlapc as backend
from overlapc.runtime.step import StepPlan
from overlapc.warm import watch

Compile = Callable[..., Callable[..., Any]]
OPTIONS = {"warm_start": False, "native": False}


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, requires_grad=True)


def error_of(call: Callable[[], Any]) -> bool:
    """Whether `call` raises."""
    try:
        call()
    except RuntimeError:
        return True
    return False


def lean_calls(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Return a list to which every later call without AOTAutograd's wrapper appends its plan."""
    calls: list[StepPlan] = []
    make = watch.step_function

    def watched(plan: StepPlan, *arguments: Any) -> Callable[..., Any]:
        step = make(plan, *arguments)

        def call(*inputs: Any) -> Any:
            calls.append(plan)
            return step(*inputs)

        return call

    monkeypatch.setattr(watch, "step_function", watched)
    return calls


def observed(run: Callable[[Compile], Any], name: str) -> Any:
    """Return the observations of the scenario `run` with the backend `name`: "overlapc" or "aot_eager"."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    if name == "aot_eager":
        return run(lambda function, **kwargs: torch.compile(function, backend="aot_eager", **kwargs))
    return run(lambda function, **kwargs: torch.compile(function, backend=backend, options=OPTIONS, **kwargs))
