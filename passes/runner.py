"""Select passes by name, and run them: each is timed, verified and dumped."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import time
from collections.abc import Sequence
from typing import Any

from overlapc.errors import ConfigError, ScheduleError, unknown_name
from overlapc.passes.base import REGISTERED, Context, Pass, PassReport
from overlapc.passes.bisect import first_moves, parse_stop
from overlapc.passes.pipeline import ORDER  # which imports, and so registers, every pass of overlapc
from overlapc.schedule.model import Schedule
from overlapc.schedule.verify import verify

_SIGNATURE = "a function (Schedule, Context) -> (Schedule, PassReport)"


def select(passes: Sequence[str | Pass] | None) -> tuple[tuple[str, Pass], ...]:
    """Return (name, pass) for names, callables and `package.module:function`; None selects the default order.

    Raise ConfigError for an unknown name, a failed import, or an object that cannot be called as a pass.
    """
    chosen: list[tuple[str, Pass]] = []
    for choice in ORDER if passes is None else passes:
        if isinstance(choice, str) and choice in REGISTERED:
            chosen.append((choice, REGISTERED[choice]))
        elif isinstance(choice, str) and ":" not in choice:
            raise ConfigError(unknown_name("pass", choice, REGISTERED))
        else:
            chosen.append(_checked(_imported(choice) if isinstance(choice, str) else choice))
    return tuple(chosen)


def is_ours(name: str) -> bool:
    """Whether the pass of this name is built in, so that overlapc's own source code determines what it does."""
    return ":" not in name and select((name,))[0][1].__module__.startswith("overlapc.")


def _imported(path: str) -> Pass:
    """Import the function that `package.module:function` names."""
    module, _, name = path.partition(":")
    try:
        pass_fn: Pass = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"passes: cannot import {path}: {error}; is its folder on PYTHONPATH?") from None
    return pass_fn


def _checked(pass_fn: Pass) -> tuple[str, Pass]:
    name = getattr(pass_fn, "__name__", type(pass_fn).__name__)
    try:
        inspect.signature(pass_fn).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"passes: {name} is not a pass ({error}); a pass is {_SIGNATURE}") from None
    return name, pass_fn


def run_passes(
    schedule: Schedule, ctx: Context, passes: Sequence[tuple[str, Pass]]
) -> tuple[Schedule, tuple[PassReport, ...]]:
    """Run the passes up to `Context.stop_after`; time, verify and dump each of them."""
    last, moves = parse_stop(ctx.stop_after) if ctx.stop_after is not None else (None, None)
    reports: list[PassReport] = []
    current = schedule
    for number, (name, pass_fn) in enumerate(passes, 1):
        if ctx.dump is not None:
            ctx.dump(f"{number:02}_{name}.before", str(current))
        begin = time.perf_counter()
        limited = dataclasses.replace(ctx, most_moves=moves) if name == last else ctx
        moved, report = _call(name, pass_fn, current, limited)
        if name == last and moves is not None and not report.counted:
            moved = first_moves(current, moved, moves)
        report.seconds = time.perf_counter() - begin
        report.changed = moved is not current
        if ctx.verify and not ctx.trial and report.changed:
            verify(
                moved,
                name,
                reference=current,
                merged=report.merged,
                may_reorder_collectives=ctx.reorder_collectives,
                # The first moves of a pass may need more memory than all its moves.
                limit_bytes=None if name == last and moves is not None else ctx.limit_bytes(schedule),
            )
        if ctx.dump is not None:
            ctx.dump(f"{number:02}_{name}.after", str(moved))
        current = moved
        reports.append(report)
        if name == last:
            break
    return current, tuple(reports)


def _call(name: str, pass_fn: Pass, schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Call a pass. Raise ScheduleError, with its name, for an illegal move or a result of another type."""
    try:
        result: Any = schedule.known_fact(name, of=(pass_fn, ctx)) or pass_fn(schedule, ctx)  # `bucket` ran some
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from error
    match result:
        case (Schedule() as moved, PassReport() as report):
            return moved, report
    raise ScheduleError(f"{name} returned {type(result).__name__}; a pass is {_SIGNATURE}")
