"""Meetings of ranks through the rendezvous store: each rank contributes a value, and all ranks get the same verdict.

The store is used instead of a collective because a collective with a missing rank hangs, while a store has a timeout.

    rank 0   set arrival/0, add arrived (1) ............................ wait verdict, get, add read (1)
    rank 1   set arrival/1, add arrived (2 = all): decide, set verdict . wait verdict, get, add read (2 = all): delete

The rank that arrives last decides, so that every rank waits only once. The verdict is set once, by
compare_set: a rank that gives up, one that fails and one that decides may race, and all ranks still get
the same verdict. The last rank to read it deletes the meeting's keys. These are 5 requests per rank, plus one
read and one delete per rank by the ranks that decide and clean up, whatever the number of ranks.

Meetings of the same ranks are numbered; the number is part of the key. A rank enters meeting n + 1 only
after it has left meeting n.

No request to the store lasts longer than the meeting's timeout plus a few seconds (`timed_store`), because the process
that hosts the store may be stopped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import torch.distributed as dist

from overlapc.agreement.departures import departed, is_watched
from overlapc.agreement.timed_store import NoAnswer, TimedStore
from overlapc.errors import RanksDisagree
from overlapc.runtime.phases import phase

Decide: TypeAlias = Callable[[Mapping[int, bytes]], bytes]
"""Computes the verdict from the ranks' values, by rank. It must not depend on which rank calls it. It may raise
RanksDisagree, which then is the verdict for all ranks."""

Notes: TypeAlias = Mapping[str, str]
"""What a compilation depends on besides its graph, as text by name: options, variables, versions."""

STEPS = "optimizer steps so far"  # a note that the error of a waiting rank shows

_SHOWN_DIFFERENCES, _SHOWN_CHARS = 8, 80
_AGREED, _FAILED = b"+", b"!"
_GRACE_S = 5.0  # time that a rank which timed out waits for the verdict of the first rank that timed out
_LINGER_S = 1.0  # time that rank 0, which often hosts the store, waits for others to read a failure before it may exit


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: `[0, 1, 2, 5]` -> `0-2,5`; after the eighth range only a count."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:8]]
    rest = sum(last - first + 1 for first, last in runs[8:])
    return ",".join(shown) + (f" and {rest} more" if rest else "")


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0-2,5`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"


class _Keys:
    """The keys of one meeting."""

    def __init__(self, meeting: str) -> None:
        self.meeting = meeting
        self.arrived = f"{meeting}/arrived"  # number of contributors that have arrived
        self.verdict = f"{meeting}/verdict"  # set once
        self.read = f"{meeting}/read"  # number of ranks that have left
        self.gave_up = f"{meeting}/gave_up"  # number of ranks that timed out

    def arrival(self, rank: int) -> str:
        return f"{self.meeting}/arrival/{rank}"


class Meetings:
    """The successive meetings of `ranks`, from the side of `rank`, which is one of them.

    Every rank must create its own object from the same `ranks` and `run` over the same store. `run` distinguishes
    jobs that use one store one after the other (elastic restarts). Not thread-safe.
    """

    def __init__(
        self, store: dist.Store | Callable[[], dist.Store], rank: int, ranks: Sequence[int], run: str = ""
    ) -> None:
        """store: a store, or a function that connects to it, called at the first meeting."""
        self.ranks = tuple(sorted(set(ranks)))
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not one of the ranks of this meeting: {format_ranks(self.ranks)}")
        self.rank = rank
        self._store = TimedStore(store)
        members = hashlib.sha256(repr((run, self.ranks)).encode()).hexdigest()[:16]
        self._prefix = f"overlapc/{members}"
        self._held = 0
        self._open: _Keys | None = None  # the meeting that was entered and not left: a failure is published there
        self._last_full = ""

    @phase("rank agreement")
    def meet(
        self,
        at: str,
        brought: bytes,
        decide: Decide,
        timeout_s: float,
        contributors: Sequence[int] | None = None,
        notes: Notes = MappingProxyType({}),
    ) -> bytes:
        """Contribute `brought` to the next meeting and return its decision, which is the same on every rank.

        at: the subject of this meeting ("compilation 2 (forward), graph"); must be equal on all ranks.
        contributors: the ranks that contribute (default: all); the others only wait for the verdict.
        notes: possible reasons why ranks have different subjects; an error shows those that differ.
        Raise RanksDisagree, with the same text on every rank, if the ranks have different subjects, if a rank does not
        arrive within `timeout_s`, if a rank fails, or if `decide` raises it.
        """
        awaited = self.ranks if contributors is None else tuple(contributors)
        if len(self.ranks) == 1:
            return decide({self.rank: brought})
        keys = self._open = self._next()
        self._store.deadline_s = time.monotonic() + timeout_s
        try:
            if self.rank in awaited:
                head = f"{at}\n{json.dumps(dict(notes))}\n".encode()
                self._store.set(keys.arrival(self.rank), head + brought)
                if self._store.add(keys.arrived, 1) == len(awaited):
                    self._close(keys, awaited, decide)
            verdict = self._wait(keys, awaited, self._store.deadline_s)
            if verdict is None:
                verdict = self._give_up(keys, at, awaited, decide, timeout_s, notes)
            self._leave(keys, awaited, verdict)
            self._open = None
        except dist.DistNetworkError as error:
            raise RanksDisagree(
                f"rank {self.rank} lost the rendezvous store{self._store} at {at}: the process that hosts it ended, or"
                f" the network is down\n   {str(error).splitlines()[0]}"
                "\nhint: the cause is in the output of the rank that ended first (often rank 0 or the launcher)"
            ) from error
        except NoAnswer as asked:
            raise RanksDisagree(
                f"the rendezvous store{self._store} does not answer rank {self.rank} at {at} (rank_timeout:"
                f" {timeout_s:g} s)\n   the request was {asked}"
                "\nhint: the process that hosts the store (often rank 0 or the launcher) has ended, is stopped or is"
                " overloaded, or the network is down; if that process is only slow, raise"
                ' options={"rank_timeout": seconds}'
            ) from None
        if verdict.startswith(_FAILED):
            raise RanksDisagree(verdict[1:].decode())
        if contributors is None:
            self._last_full = at
        return verdict[1:]

    def fail(self, reason: str) -> None:
        """Make all ranks stop with this reason, at the meeting that this rank is in, else at the next one.

        No error is raised if the store does not answer, because the caller is about to raise one.
        """
        if len(self.ranks) == 1:
            return
        keys = self._open or self._next()
        self._open = None
        self._store.deadline_s = 0.0
        try:
            verdict = self._publish(keys, _FAILED + reason.encode())
            self._leave(keys, self.ranks, verdict)
        except (dist.DistError, NoAnswer):
            return

    def _next(self) -> _Keys:
        self._held += 1
        return _Keys(f"{self._prefix}/{self._held}")

    def _publish(self, keys: _Keys, verdict: bytes) -> bytes:
        """Set the verdict unless it is set already; return the verdict that is set."""
        return self._store.compare_set(keys.verdict, verdict)

    def _close(self, keys: _Keys, awaited: Sequence[int], decide: Decide) -> None:
        """Decide and publish the verdict; all contributors have arrived."""
        try:
            values = self._store.multi_get([keys.arrival(rank) for rank in awaited])
            verdict = _AGREED + decide(_contributions(dict(zip(awaited, values, strict=True))))
        except RanksDisagree as error:
            verdict = _FAILED + str(error).encode()
        except BaseException as error:
            self._publish(keys, _FAILED + f"rank {self.rank} failed: {type(error).__name__}: {error}".encode())
            raise
        self._publish(keys, verdict)

    def _wait(self, keys: _Keys, awaited: Sequence[int], deadline_s: float) -> bytes | None:
        """Return the verdict, or None if there is none by `deadline_s` (time.monotonic) or a contributor has ended."""
        came: set[int] = set()  # ranks that arrived before they ended
        stop = (lambda: not departed(awaited).keys() <= came) if is_watched() else None
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s > 0 and self._store.wait(keys.verdict, left_s, stop):
                return self._store.get(keys.verdict)
            ended = departed(awaited).keys()
            if left_s <= 0 or self._ended(keys, awaited):
                return self._store.get(keys.verdict) if self._store.check(keys.verdict) else None
            came |= ended

    def _ended(self, keys: _Keys, awaited: Sequence[int]) -> dict[int, str]:
        """Return the ranks that ended before they arrived at this meeting, and how they ended."""
        ended = departed(awaited)
        return {rank: how for rank, how in ended.items() if not self._store.check(keys.arrival(rank))}

    def _give_up(
        self, keys: _Keys, at: str, awaited: Sequence[int], decide: Decide, timeout_s: float, notes: Notes
    ) -> bytes:
        """Return a verdict after the timeout: the first rank here determines the missing ranks, the others wait."""
        if self._store.add(keys.gave_up, 1) > 1:
            verdict = self._wait(keys, (), time.monotonic() + _GRACE_S)
            if verdict is not None:
                return verdict
        missing = [rank for rank in awaited if not self._store.check(keys.arrival(rank))]
        ended = self._ended(keys, awaited)
        if not missing:  # the last rank to arrive died before it decided, or has not decided yet
            self._close(keys, awaited, decide)
        else:
            here = [rank for rank in awaited if rank not in set(missing)]
            reason = _missing(at, missing, here, self._last_full, timeout_s, ended, notes)
            self._publish(keys, _FAILED + reason.encode())
        return self._store.get(keys.verdict)

    def _leave(self, keys: _Keys, awaited: Sequence[int], verdict: bytes) -> None:
        if verdict.startswith(_FAILED) and self.rank == 0:
            until_s = time.monotonic() + _LINGER_S
            while time.monotonic() < until_s:
                if self._store.add(keys.read, 0) >= self._store.add(keys.arrived, 0) - 1:
                    break
                time.sleep(0.01)
        if self._store.add(keys.read, 1) == len(self.ranks):
            for rank in awaited:
                self._store.delete_key(keys.arrival(rank))
            for key in (keys.arrived, keys.gave_up, keys.verdict, keys.read):
                self._store.delete_key(key)


def _contributions(arrivals: Mapping[int, bytes]) -> dict[int, bytes]:
    """Return the contributions by rank. Raise RanksDisagree if the subjects of the ranks differ."""
    values: dict[int, bytes] = {}
    notes: dict[int, Notes] = {}
    ranks_by_subject: dict[str, list[int]] = {}
    for rank, arrival in arrivals.items():
        subject, note_text, values[rank] = arrival.split(b"\n", 2)
        notes[rank] = json.loads(note_text)
        ranks_by_subject.setdefault(subject.decode(), []).append(rank)
    if len(ranks_by_subject) > 1:
        raise RanksDisagree(
            "ranks are compiling different graphs, or are at different stages of a compilation"
            + "".join(f"\n   {name_ranks(ranks)}: {subject}" for subject, ranks in ranks_by_subject.items())
            + "".join(f"\n{line}" for line in differences(notes))
            + "\nhint: a rank compiled or recompiled a graph that others did not; TORCH_LOGS=recompiles says why"
        )
    return values


def differences(notes: Mapping[int, Notes]) -> list[str]:
    """Return lines about the notes in which ranks differ, below a heading; empty if all notes are equal."""
    lines = []
    for name in sorted({name for noted in notes.values() for name in noted}):
        by_value: dict[str, list[int]] = {}
        for rank in sorted(notes):
            by_value.setdefault(notes[rank].get(name, "not set"), []).append(rank)
        if len(by_value) > 1:
            shown = (f"{value[:_SHOWN_CHARS]} on {name_ranks(ranks)}" for value, ranks in by_value.items())
            lines.append(f"   {name}: {', '.join(shown)}")
    rest = len(lines) - _SHOWN_DIFFERENCES
    if rest > 0:
        lines[_SHOWN_DIFFERENCES:] = [f"   and {rest} more"]
    return ["these settings also differ between ranks:", *lines] if lines else []


def _missing(
    at: str,
    missing: Sequence[int],
    here: Sequence[int],
    last_full: str,
    timeout_s: float,
    ended: Mapping[int, str],
    notes: Notes,
) -> str:
    last = (
        f"last agreement of all ranks: {last_full}"
        if last_full
        else "these ranks have agreed on nothing before in this job"
    )
    if STEPS in notes:
        last += f"; {STEPS}: {notes[STEPS]}"
    where = f"\n   waiting there: {name_ranks(here)}\n   {last}\nhint: "
    if ended:
        first = min(ended)
        return (
            f"rank {first} {ended[first]} and will not reach {at}{where}the cause is in the output of rank {first};"
            " all ranks must take the same steps"
        )
    return (
        f"{name_ranks(missing)} did not reach {at} within {timeout_s:g} s{where}"
        "a rank that died, is stuck, or skips a compilation keeps the others waiting: see its output; "
        'if it is only slow, raise options={"rank_timeout": seconds}; if input sizes change on some ranks only, '
        "these ranks recompile alone, which works only if no collective that they share with other ranks depends on"
        " these sizes: drop or pad such batches (drop_last=True), or compile one graph for all sizes on all ranks:"
        " torch.compile(..., dynamic=True)"
    )
