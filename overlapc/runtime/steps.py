"""Which compiled graphs a training step calls, and how often: counted while a job runs.

Steps end where optimizers step. Of several optimizers (a generator's and a discriminator's) each steps once in a step:
the next one begins behind the last of them. A compiled optimizer runs no hook: where no other steps, a graph without
backward that changes its inputs is taken for one.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from overlapc.runtime.optimizer_memory import state_bytes

_KEPT = 64  # steps: the majority of the last ones defines the typical step

Calls = tuple[tuple[str, int], ...]  # graph and how often, of those that were called


@dataclass
class Steps:
    """What was called since this process began, and in each of the last steps."""

    seen: int = 0  # steps that have ended and called something
    stepped: int = 0  # times that an optimizer stepped
    tokens: int = 0  # of a step on all ranks, as given by the script; 0 if it gave none
    ends_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))  # when the last steps ended, by the host
    counts: dict[str, list[int]] = field(default_factory=dict)  # graph -> one number: calls in all
    recent: deque[Calls] = field(default_factory=lambda: deque(maxlen=_KEPT))
    optimizers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # that stepped and run hooks
    state: dict[str, int] = field(default_factory=dict)  # theirs when the last of them first stepped, as `state_bytes`
    _stepped: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # optimizers, since the last step ended
    _hook_ran: bool = False  # of an optimizer that is not compiled
    _ended: dict[str, int] = field(default_factory=dict)  # calls in all when the last step ended
    _latest_s: float = 0.0  # when that was
    _latest: dict[str, int] = field(default_factory=dict)  # calls in all when an optimizer stepped last

    def counter(self, graph: str) -> list[int]:
        """The number that each call of `graph` adds to."""
        return self.counts.setdefault(graph, [0])

    def optimizer_stepped(self, optimizer: Any) -> None:
        """An optimizer that is not compiled has stepped."""
        self._hook_ran = True
        if optimizer not in self.optimizers:
            self.optimizers.add(optimizer)
            self.state = state_bytes(self.optimizers)
        self._step(optimizer)

    def optimizer_bytes(self) -> dict[str, int]:
        """Class -> bytes of state. For optimizers that were freed (a script's `main` returned), what was last seen."""
        return state_bytes(self.optimizers) or dict(self.state)

    def inputs_changed(self, graph: Any) -> None:
        """A compiled graph has changed its inputs, and no backward follows: an optimizer, unless others run hooks."""
        if not self._hook_ran:
            self._step(graph)

    def _step(self, optimizer: Any) -> None:
        """Ends the step before this one, if `optimizer` has stepped since it began."""
        self.stepped += 1
        if optimizer in self._stepped:
            self._end()
        self._stepped.add(optimizer)
        self._latest_s = time.perf_counter()
        self._latest = {graph: number for graph, (number,) in self.counts.items()}

    def typical(self) -> Mapping[str, int]:
        """Graph -> calls in a step, as most of the last ones called it; empty before an optimizer has stepped."""
        current = self._since(self._latest)
        kinds = Counter([*self.recent, *([current] if current else [])])
        if not kinds:
            return {}
        most = max(kinds.values())
        return dict([kind for kind, times in kinds.items() if times == most][-1])

    def step_s(self) -> float | None:
        """The median time between the ends of the last steps; None before two have ended."""
        ends = list(self.ends_s)
        return median(b - a for a, b in itertools.pairwise(ends)) if len(ends) > 1 else None

    def clear(self) -> None:
        """Forgets steps and calls; graphs that are compiled already are counted no more."""
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
        """What was called between the end of the last step and `latest`."""
        since = ((graph, number - self._ended.get(graph, 0)) for graph, number in latest.items())
        return tuple((graph, number) for graph, number in since if number)


STEPS = Steps()


def as_optimizer(call: Callable[[list[Any]], tuple[Any, ...]]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """`call` of a graph that changes its inputs and that no backward follows, telling `STEPS` of it."""

    def update(args: list[Any]) -> tuple[Any, ...]:
        results = call(args)
        STEPS.inputs_changed(update)
        return results

    return update


@cache
def watch_optimizers() -> None:
    """Lets every optimizer of this process tell `STEPS` of its steps."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if not torch.compiler.is_compiling():  # Dynamo traces hooks with the optimizer that it compiles
        STEPS.optimizer_stepped(optimizer)
