"""`overlapc plan SCHEDULE`: runs the passes on schedules in text form, without a GPU and without ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from overlapc.config import Config
from overlapc.errors import ConfigError
from overlapc.estimators.base import estimate_schedule
from overlapc.estimators.device import IDEAL
from overlapc.estimators.from_profile import from_profile
from overlapc.estimators.profiles.profile_file import load_profile
from overlapc.passes.run import run_pipeline
from overlapc.planning.pass_context import context_of
from overlapc.report.earlier import users_estimator
from overlapc.report.graph_record import graph_record
from overlapc.report.model import StepRecord
from overlapc.report.record import Report
from overlapc.report.saved_schedules import saved_context
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Schedule
from overlapc.schedule.text import parse
from overlapc.schedule.verify import verify

_HEADER = re.compile(r"^[ \t]*schedule[ \t]", re.MULTILINE)


def plan_text(text: str, config: Config) -> Report:
    """Run the passes of `config` on every schedule in `text`. Return the report of one rank.

    A node's time is that of `config.estimates`, else that in the text, else an estimate from `config.profile` or from
    the profile saved with the text; without any of these it is unknown. ScheduleError for text that cannot be parsed or
    breaks a rule, ConfigError for text without any schedule.
    """
    named = None if config.profile is None else load_profile(config.profile)
    saved = saved_context(text)
    graphs = []
    for part in parts(text):
        schedule = parse(part)
        verify(schedule, schedule.name)
        profile = named or saved.profiles.get(schedule.name, IDEAL)
        chain = from_profile(profile)
        context = context_of(config, profile, None if profile is IDEAL else chain)
        context = replace(context, budget_bytes=config.memory_budget)
        result = run_pipeline(estimate_schedule(_as_the_user_says(schedule, config), chain), context)
        graphs.append(graph_record(result, budget_bytes=context.budget_bytes))
    return Report((StepRecord(world_size=saved.world_size, graphs=tuple(graphs), calls=saved.calls),))


def _as_the_user_says(schedule: Schedule, config: Config) -> Schedule:
    user = users_estimator(config.estimates, schedule.name)
    if user is None:
        return schedule
    estimates = {node.name: user.estimate(node) for node in schedule.nodes if node.kind in (*COMPUTE, *COMMUNICATION)}
    return schedule.with_estimates({name: estimate for name, estimate in estimates.items() if estimate is not None})


def parts(text: str) -> Iterator[str]:
    """Yield the text of each schedule, after as many empty lines as lines precede it, so that errors name its line."""
    starts = [match.start() for match in _HEADER.finditer(text)] or [0]
    if not text.strip():
        raise ConfigError("no schedule in this file: it is empty")
    if text.lstrip()[0] in "{[":
        raise ConfigError(
            "no schedule in this file: it contains JSON; for a record, run overlapc report FILE --save schedule.txt"
        )
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        before = text[:start] if start != starts[0] else ""
        lead = "\n" * before.count("\n")
        yield lead + text[start if before else 0 : end]
