"""The streams of a GPU on which forwards that are not one graph communicate while modules compute.

    compute      module 1 ............ | module 2 ............ | module 3       and then the backward:
    gathers      2                     | 3                     |

    compute      backward of 3 ....... | backward of 2 ....... | backward of 1
    gathers      2                     | 1                     |
    reductions                         | 3 .....               | 2 .....

The gather for the next module is issued when a module begins: in forward for that which came next the last time. The
gather waits for nothing but the memory that it reuses: that of the module before. So two modules hold their gathered
parameters at a time. A reduction runs beside the backward of the next module, which waits for it where it ends: two
modules hold their full gradients at a time. On a CPU all of this happens at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Protocol

import torch


class Freeable(Protocol):
    """Something whose memory is freed by a later gather."""

    freed_after: object  # which `free` decided that; None if it was needed again in the meantime

    def empty(self) -> None:
        """Free the memory."""


class GatherStream:
    """The streams of one device, and the memory that its next gathers may reuse."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reductions = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reducing: tuple[Any, torch.cuda.Event] | None = None  # the gradients of a reduction, and its end
        self._reusable_after: list[torch.cuda.Event] = []
        self._waiting: list[tuple[list[Freeable], torch.cuda.Event]] = []  # with the end of their last use
        self.follow_compute()

    def follow_compute(self) -> None:
        """Let later gathers begin after the compute issued so far, which may have changed what they gather."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def run(self, gather: Callable[[], None]) -> torch.cuda.Event | None:
        """Run `gather`; return the event that its results have to wait for, if there is one."""
        if self._stream is None:
            gather()
            return None
        self.empty_freed()
        with torch.cuda.stream(self._stream):
            for event in self._reusable_after:
                self._stream.wait_event(event)
            gather()
            ready: torch.cuda.Event = self._stream.record_event()
        self._reusable_after = []
        return ready

    def empty_freed(self) -> None:
        """Free the memory that is not needed any more; the next gather waits until it has been used."""
        for each, event in self._waiting:
            for one in each:
                if one.freed_after is event:
                    one.freed_after = None
                    one.empty()
            self._reusable_after.append(event)
        self._waiting = []

    def free(self, used: Iterable[Freeable]) -> None:
        """Free the memory of `used`, which the compute issued so far has used last."""
        used = list(used)
        if self._stream is None:
            for one in used:
                one.empty()
            return
        event = torch.cuda.current_stream(self._stream.device).record_event()
        for one in used:
            one.freed_after = event
        self._waiting.append((used, event))

    def for_reductions(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the stream of reductions is the current one."""
        return contextlib.nullcontext() if self._reductions is None else torch.cuda.stream(self._reductions)

    def reduce(self, reduction: Callable[[], Any], grads: Any) -> Any:
        """Return the result of `reduction`, called in a backward.

        Later compute waits for it only where it calls this again, or `end_reduction`, which the end of backward calls.
        grads: what it reads; kept until compute has waited for it.
        """
        if self._reductions is None:
            return reduction()
        self.end_reduction()
        self._reductions.wait_stream(torch.cuda.current_stream(self._reductions.device))
        with torch.cuda.stream(self._reductions):
            reduced = reduction()
            self._reducing = grads, self._reductions.record_event()
        torch.autograd.Variable._execution_engine.queue_callback(self.end_reduction)
        return reduced

    def end_reduction(self) -> None:
        """Let later compute wait for the reduction that runs, and reuse the memory of its gradients."""
        if self._reducing is not None:
            self._reducing[1].wait()
            self._reducing = None


@cache
def gather_stream(device: torch.device) -> GatherStream:
    """Return the stream of `device`."""
    return GatherStream(device)
