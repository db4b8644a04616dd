"""Plans and records steps without compiling them: for `overlapc plan`, which runs on any machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule

from overlapc.codegen.copies import laid_out_bytes, peak_with_pools
from overlapc.compilation.fake_results import results_of
from overlapc.compilation.inner_graphs import Built, inner_graphs, times_of_inner
from overlapc.compilation.kept_parameters import choice_of, partition_of
from overlapc.compilation.recording import counts_of, record_of
from overlapc.compilation.tracing import step_of
from overlapc.config import Config
from overlapc.passes.base import Context
from overlapc.passes.run import Result
from overlapc.planning.dumps import Dumps
from overlapc.planning.graph_planner import Planned
from overlapc.planning.keep_gathered import Step, kept_gathers
from overlapc.planning.plan_graph import plan_graph, without_measuring_kernels
from overlapc.report import record
from overlapc.report.kept_gathered import NO_BUDGET, SWITCHED_OFF, GatherChoice
from overlapc.runtime.counters import count
from overlapc.runtime.phases import phase
from overlapc.runtime.steps import STEPS
from overlapc.schedule.model import Schedule

OnSchedule = Callable[[Schedule, Context], None]


def plan_step(gm: GraphModule, example_inputs: Sequence[Any], config: Config, number: int) -> Callable[..., Any]:
    """Plan forward and backward of `gm`. Return a step for fake tensors that makes results like theirs."""
    return step_of(_plan_only, gm, example_inputs, config, number, partition_of(gm, config, number, will_run=False))


def schedule_step(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, number: int, on_schedule: OnSchedule
) -> Callable[..., Any]:
    """Call `on_schedule` with forward's and with backward's schedule before the passes, and the passes' context."""
    return step_of(partial(_schedule_only, on_schedule=on_schedule), gm, example_inputs, config, number)


def plan_schedules(forward: tuple[Schedule, Context], backward: tuple[Schedule, Context], config: Config) -> None:
    """Run the passes on a forward and a backward, as `schedule_step` gives them, and record both as graphs of this
    process."""
    step = Step.of(forward, backward)
    again = frozenset(step.gathered_twice)
    choice = GatherChoice(frozenset(), again, NO_BUDGET if config.memory_budget is None else SWITCHED_OFF)
    if config.memory_budget is not None and config.keep_gathered:
        kept, why = kept_gathers(step, again)
        step, choice = step.keeping(kept), GatherChoice(frozenset(kept), again, why)
    began = time.perf_counter()
    for result in step.plans:
        _remember(result, began, choice)


def _plan_only(gm: GraphModule, example_inputs: Sequence[Any], *, config: Config, name: str) -> Callable[..., Any]:
    """Plan and record a graph of fake tensors. Return a function that makes fake results: no code is generated."""
    began = time.perf_counter()
    with phase("graph"):
        planned = _plan(gm, config, name)
        _remember(planned.result, began, choice_of(gm), planned)
    calls = STEPS.counter(name)
    results = results_of(gm)

    def run(*args: Any) -> Any:
        calls[0] += 1
        return results(*args)

    return make_boxed_func(run)


def _schedule_only(
    gm: GraphModule, example_inputs: Sequence[Any], *, config: Config, name: str, on_schedule: OnSchedule
) -> Callable[..., Any]:
    """Run the stages of `_plan_only` that come before the passes."""
    scheduled = _plan(gm, config, name, schedule_only=True).scheduled
    on_schedule(scheduled.schedule, scheduled.context)
    return make_boxed_func(results_of(gm))


def _plan(gm: GraphModule, config: Config, name: str, schedule_only: bool = False) -> Planned:
    # The plan is for another machine: measurements on this one say nothing about it.
    config = replace(without_measuring_kernels(config), measure_matmuls=False)
    of_inner = times_of_inner(gm, inner_graphs(gm, config, name, _planned_inner))
    dumps = Dumps(config, name)
    planned = plan_graph(
        gm,
        config=config,
        name=name,
        dumps=dumps,
        inner_estimates=of_inner,
        will_run=False,
        schedule_only=schedule_only,
    )
    assert isinstance(planned, Planned), "no cached graph was given"
    return planned


def _planned_inner(gm: GraphModule, config: Config, name: str, *, is_inner: bool, single: bool) -> Built:
    planned = _plan(gm, config, name)
    _count(planned.result, planned)
    return Built(make_boxed_func(gm.forward), planned.result.after.step_ns)


def _remember(result: Result, began: float, choice: GatherChoice, planned: Planned | None = None) -> None:
    _count(result, planned)
    shared = laid_out_bytes(result.schedule)
    graph = replace(
        record_of(result, choice, planned),
        compile_seconds=time.perf_counter() - began,
        pool_bytes=shared,
        peak_bytes=peak_with_pools(result.schedule, shared),
    )
    record.add(graph)


def _count(result: Result, planned: Planned | None) -> None:
    for counter, times in counts_of(result, planned).items():
        count(counter, times)
