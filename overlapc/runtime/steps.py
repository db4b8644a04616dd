"""Count, while a job runs, which compiled graphs a training step calls, and how often.

A step ends where the optimizer steps. With several optimizers (a generator's and a discriminator's) each steps once per
step, and the step ends after the last of them. A compiled optimizer runs no hooks: if no other optimizer steps, a graph
without backward that changes its inputs counts as an optimizer.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import median_low
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from overlapc.runtime.optimizer_memory import state_bytes

_KEPT = 64  # number of steps kept; the most frequent one among them is the typical step

Calls = tuple[tuple[str, int], ...]  # (graph, number of calls) of each graph that was called


@dataclass
class Steps:
    """The graphs called since this process began, and in each of the last steps."""

    seen: int = 0  # number of steps that have ended and called a graph
    stepped: int = 0  # number of times that an optimizer stepped
    tokens: int = 0  # tokens per step on all ranks, as given by the script; 0 if it gave none
    ends_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))  # host times when the last steps ended
    counts: dict[str, list[int]] = field(default_factory=dict)  # graph -> [total calls]
    recent: deque[Calls] = field(default_factory=lambda: deque(maxlen=_KEPT))
    optimizers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # those that stepped and run hooks
    state: dict[str, int] = field(default_factory=dict)  # their `state_bytes` when the last of them first stepped
    _stepped: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # optimizers, since the last step ended
    _hook_ran: bool = False  # whether an optimizer that is not compiled has stepped
    _ended: dict[str, int] = field(default_factory=dict)  # total calls by graph when the last step ended
    _latest_s: float = 0.0  # when an optimizer last stepped
    _latest: dict[str, int] = field(default_factory=dict)  # total calls by graph when an optimizer last stepped

    def counter(self, graph: str) -> list[int]:
        """Return the list whose only element each call of `graph` increments."""
        return self.counts.setdefault(graph, [0])

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Note that an optimizer that is not compiled has stepped."""
        self._hook_ran = True
        if optimizer not in self.optimizers:
            self.optimizers.add(optimizer)
            self.state = state_bytes(self.optimizers)
        self._step(optimizer)

    def optimizer_bytes(self) -> dict[str, int]:
        """Return class -> bytes of state; if the optimizers were freed (a script's `main` returned), the last known."""
        return state_bytes(self.optimizers) or dict(self.state)

    def inputs_changed(self, graph: Any) -> None:
        """Note that a compiled graph without backward changed its inputs: an optimizer, unless optimizers run hooks."""
        if not self._hook_ran:
            self._step(graph)

    def _step(self, optimizer: Any) -> None:
        """Note that `optimizer` stepped; if it had already stepped in the current step, a new step begins."""
        self.stepped += 1
        if optimizer in self._stepped:
            self._end()
        self._stepped.add(optimizer)
        self._latest_s = time.perf_counter()
        self._latest = {graph: number for graph, (number,) in self.counts.items()}

    def typical(self) -> Mapping[str, int]:
        """Return graph -> calls in the most frequent of the last steps; empty before an optimizer has stepped."""
        current = self._since(self._latest)
        kinds = Counter([*self.recent, *([current] if current else [])])
        if not kinds:
            return {}
        most = max(kinds.values())
        return dict([kind for kind, times in kinds.items() if times == most][-1])

    def step_s(self) -> float | None:
        """Return the median time between the ends of the last steps, the lower one of an even number, because the first
        step is slow; None before two have ended."""
        ends = list(self.ends_s)
        return median_low(b - a for a, b in itertools.pairwise(ends)) if len(ends) > 1 else None

    def clear(self) -> None:
        """Forget steps and calls; graphs that are compiled already are no longer counted."""
        self.seen = self.stepped = self.tokens = 0
        self._hook_ran = False
        for each in (self.counts, self.recent, self.ends_s, self.optimizers, self.state, self._stepped, self._ended):
            each.clear()
        self._latest.clear()

    def _end(self) -> None:
        calls = self._since(self._latest)
        if calls:
            self.seen += 1
            self.recent.append(calls)
            self.ends_s.append(self._latest_s)
        self._ended = self._latest
        self._stepped.clear()

    def _since(self, latest: Mapping[str, int]) -> Calls:
        """Return the calls between the end of the last step and the totals `latest`."""
        since = ((graph, number - self._ended.get(graph, 0)) for graph, number in latest.items())
        return tuple((graph, number) for graph, number in since if number)


STEPS = Steps()


def as_optimizer(call: Callable[[list[Any]], tuple[Any, ...]]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Return `call`, of a graph without backward that changes its inputs, followed by a report to `STEPS`."""

    def update(args: list[Any]) -> tuple[Any, ...]:
        results = call(args)
        STEPS.inputs_changed(update)
        return results

    return update


@cache
def watch_optimizers() -> None:
    """Make every optimizer in this process report its steps to `STEPS`."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if not torch.compiler.is_compiling():  # Dynamo traces hooks with the optimizer that it compiles
        STEPS.optimizer_stepped(optimizer)
