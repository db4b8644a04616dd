"""One problem of kernel_cases.py under one system, and the check of its results."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch
from torch.utils import _pytree as pytree

from benchmarks.kernel_cases import BACKWARD, BOTH, FORWARD, Problem

TUNED = "overlapc-tuned"
FAST = "overlapc-fast"  # numerics="fast": values between fused ops stay in float32


class Subject:
    """One problem under one system, with a callable for each kind: forward, backward, both."""

    def __init__(self, problem: Problem, system: str, name: str) -> None:
        functorch.donated_buffer = False  # backward is timed repeatedly on the same saved tensors
        self.problem = replace(problem, inputs=_own_inputs(problem))
        function = copied(problem.function, re.sub(r"[^a-zA-Z0-9]+", "_", f"{name}_{system}"))
        self.function = (
            function
            if system == "eager"
            else torch.compile(function, backend=backend_of(system), dynamic=False, options=_options(system))
        )
        self.leaves = [self.problem.inputs[at] for at in problem.gradients]
        self.tangents: list[Tensor] = []
        self.kept: list[Tensor] = []

    def forward(self) -> Any:
        if self.leaves:
            return self.function(*self.problem.inputs)
        with torch.no_grad():
            return self.function(*self.problem.inputs)

    def backward(self) -> tuple[Tensor, ...]:
        """Run backward alone, on the saved tensors of a forward that stays alive."""
        if not self.kept:
            self.kept = self._results()
        return torch.autograd.grad(self.kept, self.leaves, self.tangents, retain_graph=True)

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self._results(), self.leaves, self.tangents)

    def call(self, kind: str) -> Callable[[], Any]:
        return {FORWARD: self.forward, BACKWARD: self.backward, BOTH: self.both}[kind]

    def results(self) -> list[Tensor]:
        """Return everything the problem computes: outputs, mutated inputs, gradients."""
        found = [leaf for leaf in pytree.tree_leaves(self.forward()) if isinstance(leaf, Tensor)]
        if self.problem.mutates:
            found += self.problem.tensors()
        return [*found, *self.both()] if self.leaves else found

    def _results(self) -> list[Tensor]:
        found = [leaf for leaf in pytree.tree_leaves(self.forward()) if leaf.requires_grad]
        if not self.tangents:
            torch.manual_seed(7)
            self.tangents = [torch.randn(leaf.shape, device=leaf.device).to(leaf.dtype) for leaf in found]
        return found


def _options(system: str) -> dict[str, Any] | None:
    return {TUNED: {"autotune": True}, FAST: {"numerics": "fast"}}.get(system)


def backend_of(system: str) -> Any:
    """Return the `backend` argument of `torch.compile` for `system`."""
    if not system.startswith("overlapc"):
        return system
    from overlapc.backend import overlapc as backend  # the function, not its name: the package need not be installed

    return backend


def _own_inputs(problem: Problem) -> tuple[Any, ...]:
    """Return the inputs, copied where a system mutates or differentiates them; all systems share the other inputs."""
    if problem.mutates:
        return pytree.tree_map_only(Tensor, torch.clone, problem.inputs)
    return tuple(
        value.detach().clone().requires_grad_() if at in problem.gradients else value
        for at, value in enumerate(problem.inputs)
    )


def copied(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `function` with its own code object, so that no system sees what Dynamo cached for another one."""
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def checked(problem: Problem, subject: Subject, eager: Subject, reference: Sequence[Tensor]) -> str:
    """Return "ok", or what is wrong with the results of `subject`."""
    results = subject.results()
    if problem.random is not None:
        return problem.random(problem, results[0].detach()) or "ok"
    for at, (result, standard, exact) in enumerate(zip(results, eager.results(), reference, strict=True)):
        if result.shape != standard.shape or result.dtype != standard.dtype:
            return f"result {at}: {result.dtype} {tuple(result.shape)}"
        if not result.dtype.is_floating_point:
            equal = (result == standard).float().mean().item()
            if equal < 0.9999:
                return f"result {at}: {equal:.4%} equal eager's"
            continue
        error, allowed = _error(result, exact), 2 * _error(standard, exact) + 1e-5
        if not error <= allowed:
            return f"result {at}: error {error:.2g}, allowed {allowed:.2g}"
    return "ok"


def _error(result: Tensor, exact: Tensor) -> float:
    exact = exact.detach().double()
    return ((result.detach().double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def float64_results(problem: Problem, name: str) -> list[Tensor]:
    """Return the results of a float64 run; an empty list for a random problem."""
    if problem.random is not None:
        return []
    wide = pytree.tree_map_only(
        Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, problem.inputs
    )
    subject = Subject(replace(problem, inputs=wide), "eager", name)
    eager = Subject(problem, "eager", name)
    if problem.gradients:  # the same tangents as eager's
        eager.both()
        subject.tangents = [tangent.double() for tangent in eager.tangents]
    return [result.detach() for result in subject.results()]
