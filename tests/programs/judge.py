"""Decide whether a compiled program is right: compare it with eager, within the uncertainty of eager's own results.

Every element of every result, changed argument and gradient may differ from eager's by a few times the difference
between eager runs that round differently (`noise`); exact values must be equal. Elements that differ by more are
checked with many more such runs: an element that jumps between them (because it depends on comparing two values that
differ only by rounding) is undecidable; any other is wrong.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.programs.noise import Noise
from tests.programs.outcome import Outcome
from tests.programs.program import Program

ROUNDINGS = ((1, 1), (2, 1), (3, 2))  # (seed, units in the last place) of the eager runs that round differently
MORE_ROUNDINGS = tuple((seed, units) for units in (1, 2, 4, 8) for seed in range(10, 20))
ALLOWED = 6.0  # allowed difference, relative to the largest difference between eager's own runs
UNITS = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 6, torch.float64: 8}  # units in the last place, allowed


@dataclass(frozen=True)
class Verdict:
    """The outcome for a program; `kind` is right, undecidable, or what is wrong: error, result, argument, gradient,
    layout."""

    kind: str
    message: str = ""

    @property
    def wrong(self) -> bool:
        return self.kind not in ("right", "undecidable")

    @property
    def what(self) -> str:
        """A key that equal failures share: the kind, and for errors the first line with numbers and names replaced."""
        if self.kind != "error":
            return self.kind
        return self.kind + ": " + re.sub(r"\d+|0x[0-9a-f]+|'[^']*'", "#", self.message.split("\n")[0])[:100]


Compile = Callable[[Callable[..., Any], Program], Callable[..., Any]]


def by_overlapc(function: Callable[..., Any], program: Program) -> Callable[..., Any]:
    return torch.compile(function, backend="overlapc", dynamic=program.dynamic, options=dict(program.options))


def by_aot_eager(function: Callable[..., Any], program: Program) -> Callable[..., Any]:
    """Compile with Dynamo and AOTAutograd only: what is wrong with this backend is torch's own bug."""
    return torch.compile(function, backend="aot_eager", dynamic=program.dynamic)


def by_inductor(function: Callable[..., Any], program: Program) -> Callable[..., Any]:
    """Compile with Inductor, drawing eager's random numbers."""
    options = {"fallback_random": True}
    return torch.compile(function, backend="inductor", dynamic=program.dynamic, options=options)


def judge(program: Program, device: str = "cpu", compiler: Compile = by_overlapc) -> Verdict:
    """Compile the program and compare it with eager for each of its sizes, forward and backward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        space = program.load(device)
        compiled = compiler(space["f"], program)
        undecidable = ""
        for call in program.calls:
            eager = Outcome.of(program.load(device), call)
            try:
                ours = Outcome.of(space, call, compiled)
            except Exception as error:  # noqa: BLE001 (whatever a compiler raises where eager does not is its failure)
                return Verdict("error", f"{type(error).__name__}: {first_lines(error)}")
            verdict = compared(program, device, call, eager, ours)
            if verdict.wrong:
                return verdict
            undecidable = undecidable or verdict.message
        return Verdict("undecidable", undecidable) if undecidable else Verdict("right")


def first_lines(error: BaseException) -> str:
    text = str(error).strip()
    inner = re.search(r"raised:\n(.*)", text, re.DOTALL)
    return "\n".join((inner[1] if inner else text).splitlines()[:12])


def compared(program: Program, device: str, call: Mapping[str, int], eager: Outcome, ours: Outcome) -> Verdict:
    """Compare the outcomes of one call: traits first, then values."""
    for name, wanted in eager.traits.items():
        if ours.traits.get(name) != wanted:
            return Verdict("layout", f"{name}: {ours.traits.get(name)}; eager: {wanted}")
    if ours.traits.keys() != eager.traits.keys():
        return Verdict("layout", f"results {sorted(ours.traits)}; eager: {sorted(eager.traits)}")
    differing = [name for name in eager.values if not equal(eager.values[name], ours.values[name])]
    if not differing:
        return Verdict("right")
    known = [noisy(program, device, call, *rounding) for rounding in ROUNDINGS]
    suspects = {name: off for name in differing if (off := outside(name, eager, ours, known)).any()}
    if not suspects:
        return Verdict("right")
    known += [noisy(program, device, call, *rounding) for rounding in MORE_ROUNDINGS]
    message = ""
    for name, off in suspects.items():
        wrong = off & ~jumps(name, eager, ours, known)
        text = described(name, eager, ours, known, wrong if wrong.any() else off)
        if wrong.any():
            return Verdict(name.split()[0], text)
        message = message or text
    return Verdict("undecidable", message)


def noisy(program: Program, device: str, call: Mapping[str, int], seed: int, units: int) -> Outcome:
    """Run eager with other rounding."""
    return Outcome.of(program.load(device), call, around=Noise(seed, units))


def wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x.long().double()


def equal(expected: Any, got: Any) -> bool:
    if not isinstance(expected, Tensor):
        assert expected == got, f"{got}; eager: {expected}"
        return True
    return bool(((got == expected) | (got.isnan() & expected.isnan())).all())


def outside(name: str, eager: Outcome, ours: Outcome, known: list[Outcome]) -> Tensor:
    """Return a mask of the elements that differ by more than eager's own runs allow."""
    expected, got = eager.values[name], ours.values[name]
    same = (got == expected) | (got.isnan() & expected.isnan())
    a, b = wide(expected), wide(got)
    spread = torch.zeros_like(a)
    for run in known:
        spread = torch.maximum(spread, (a - wide(run.values[name])).abs().nan_to_num(0, 0, 0))
    unit = torch.finfo(expected.dtype).eps * UNITS[expected.dtype] if expected.dtype in UNITS else 0
    smallest = torch.finfo(expected.dtype).smallest_normal if expected.dtype in UNITS else 0
    near = (a - b).abs() <= ALLOWED * spread + unit * a.abs() + smallest
    return ~(same | near)


def jumps(name: str, eager: Outcome, ours: Outcome, known: list[Outcome]) -> Tensor:
    """Return a mask of the undecidable elements: one of eager's runs has our value, differs from eager about as much,
    or differs in whether the element is finite."""
    a, b = wide(eager.values[name]), wide(ours.values[name])
    off = (a - b).abs()
    undecided = torch.zeros_like(a, dtype=torch.bool)
    for run in known:
        c = wide(run.values[name])
        undecided |= (a - c).abs() >= off / ALLOWED
        undecided |= c.isfinite() != a.isfinite()
        undecided |= c == b
    return undecided


def described(name: str, eager: Outcome, ours: Outcome, known: list[Outcome], where: Tensor) -> str:
    at = int(where.flatten().nonzero()[0])
    a, b = (x.values[name].flatten()[at].item() for x in (eager, ours))
    runs = [wide(run.values[name]).flatten()[at].item() for run in known]
    return (
        f"{name} ({eager.traits[name]}): {int(where.sum())} of {where.numel()} elements, first at {at}: {b!r};"
        f" eager: {a!r}, {min(runs)!r} to {max(runs)!r} rounding otherwise"
    )
