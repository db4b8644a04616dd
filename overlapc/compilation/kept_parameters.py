"""Divides a joint graph into forward and backward so that gathered parameters use the room of a memory budget.

What reshards after forward is gathered again in backward. With a budget, forward and backward are planned like that
first, `planning/keep_gathered.py` chooses from the plans which parameters stay gathered, and the joint graph is divided
once more. All ranks go by the choice of the first of them; a choice on disk counts if all ranks have the same one.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from overlapc.compilation.tracing import Partition
from overlapc.config import Config
from overlapc.estimators.user_times import EarlierRun
from overlapc.fx.collectives import find_collectives
from overlapc.fx.graph_copy import copied
from overlapc.fx.partition import gathered_again, partition
from overlapc.fx.sizes import guessed_size
from overlapc.fx.subgraphs import subgraphs
from overlapc.fx.versions import ends_in_break
from overlapc.parallel.separate_blocks import compiled_alone
from overlapc.passes.base import Context
from overlapc.passes.run import Result, run_pipeline
from overlapc.planning.agreed import Captured, forget_before_reset, key_of, to_follow
from overlapc.planning.chosen_profile import profile_text
from overlapc.planning.dumps import Dumps
from overlapc.planning.keep_gathered import Step, kept_gathers
from overlapc.planning.plan_graph import (
    described,
    device_types,
    peers_of_graph,
    plan_graph,
    without_measuring_kernels,
)
from overlapc.planning.rank_notes import notes_of
from overlapc.planning.transports import rank_in_graphs
from overlapc.report.kept_gathered import NO_BUDGET, SWITCHED_OFF, GatherChoice
from overlapc.runtime.cache import KernelCache, content_key
from overlapc.runtime.counters import count
from overlapc.runtime.phases import phase
from overlapc.schedule.model import Schedule
from overlapc.warm.environment import environment_key
from overlapc.warm.fingerprint import NotCacheable, graph_key
from overlapc.warm.loading import uses_disk_cache

_SUFFIX = ".gathers.json"
_KEY = "overlapc_gathers"  # of a `GatherChoice` in GraphModule.meta


def partition_of(gm: GraphModule, config: Config, number: int, *, runs: bool) -> Partition:
    """What divides the joint graph of `gm`, which Dynamo captured as step `number`. runs: as for `plan_graph`.

    Forward and backward get a `GatherChoice` each, for the report.
    """
    return partial(_divided, config=config, number=number, runs=runs, captured=gm)


def _held_beside_others(captured: GraphModule) -> str:
    """Reason why other graphs run between forward and backward of `captured`, beside what stays gathered; "" for none.

    What these need is not known, so that the budget would not hold.
    """
    if ends_in_break(captured):
        return "a graph break follows"
    return "a module is compiled by itself" if compiled_alone(captured.graph) else ""


def _divided(
    joint: GraphModule,
    joint_inputs: Any,
    *,
    captured: GraphModule,
    config: Config,
    number: int,
    runs: bool,
    **options: Any,
) -> tuple[GraphModule, GraphModule]:
    if config.memory_budget is None or not config.keep_gathered:
        graphs = partition(joint, joint_inputs, **options)
        why = NO_BUDGET if config.memory_budget is None else SWITCHED_OFF
        return _noted(graphs, GatherChoice(frozenset(), gathered_again(graphs[1].graph), why))
    again = GraphModule(joint, copied(joint.graph))
    again.meta.update(joint.meta)
    forward, backward = partition(joint, joint_inputs, **options)
    gathers = gathered_again(backward.graph)
    if not gathers:
        return forward, backward
    reason = _held_beside_others(captured) or _unfit(config, forward, backward)
    if reason:
        count(f"parameters not kept gathered: {reason}")
        return _noted((forward, backward), GatherChoice(frozenset(), gathers, f"none are kept: {reason}"))
    kept, why = _Choice(forward, backward, gathers, without_measuring_kernels(config), number, runs).made()
    choice = GatherChoice(frozenset(kept), gathers, why)
    if not kept:
        return _noted((forward, backward), choice)
    count("gathers_kept_for_backward", len(kept))
    return _noted(partition(again, joint_inputs, keep=kept, **options), choice)


def _noted(graphs: tuple[GraphModule, GraphModule], choice: GatherChoice) -> tuple[GraphModule, GraphModule]:
    for graph in graphs:
        graph.meta[_KEY] = choice
    return graphs


def choice_of(gm: GraphModule) -> GatherChoice:
    """What was decided when the joint graph of `gm` was divided; for a graph of another kind, nothing."""
    found: GatherChoice = gm.meta.get(_KEY, GatherChoice())
    return found


def _unfit(config: Config, *graphs: GraphModule) -> str:
    """Reason why plans of these graphs would not say what keeping costs; "" for none."""
    if config.cuda_graphs:
        return "CUDA graphs would copy them out of forward and into backward"
    for graph in graphs:
        if next(subgraphs(graph), None) is not None:
            return "the step carries conditionals, loops or nested regions"
        if guessed_size(graph.graph) is not None:
            return "the step runs op by op"
    return ""


@dataclass(frozen=True)
class _Kept:
    """What ranks chose for one forward graph."""

    captured: Captured
    gathers: tuple[str, ...]
    why: str  # and no more


@dataclass(frozen=True)
class _Choice:
    """Which of `gathers` forward saves for backward."""

    forward: GraphModule
    backward: GraphModule
    gathers: Collection[str]
    config: Config
    number: int
    runs: bool

    def made(self) -> tuple[tuple[str, ...], str]:
        """The names, the same on all ranks, and why no more."""
        communication = described(find_collectives(self.forward.graph, self.config.safe_communication))
        peers = peers_of_graph(communication, self.config)
        if peers is None:  # each rank would choose by its own estimates
            reason = "ranks do not meet while compiling (rank_check)"
            count(f"parameters not kept gathered: {reason}")
            return (), f"none are kept: {reason}"
        forget_before_reset(peers)
        captured = tuple((node.name, found.comm) for node, found in communication.items())
        key = key_of("gathers", self.config)
        known: list[_Kept] = peers.agreed[key] if key is not None else []
        followed = to_follow(known, captured, peers)
        if followed is not None:  # perhaps on this rank alone
            return followed.agreed.gathers, followed.agreed.why
        meeting = partial(
            peers.agreement, "kept gathered", self.config.rank_timeout, notes_of(self.forward, self.config)
        )
        place = self._place_on_disk()
        with meeting() as agreement:
            told = agreement.tell("parameters that stay gathered", _read(place, self.config))
        if not told[0] or len(set(told)) > 1:
            planned = json.dumps(self._planned())
            with meeting() as agreement:
                told = agreement.tell("parameters that stay gathered", planned)
            if place is not None:
                _choices(self.config.cache_dir).put(place, _SUFFIX, told[0])
        kept, why = json.loads(told[0])
        known.append(_Kept(captured, tuple(kept), why))
        return tuple(kept), why

    def _planned(self) -> tuple[tuple[str, ...], str]:
        with phase("graph"):
            forward = self._schedule(self.forward, f"forward_{self.number}")
            backward = self._schedule(self.backward, f"backward_{self.number}")
            with phase("passes"):
                return kept_gathers(Step.of(forward, backward), self.gathers)

    def _schedule(self, gm: GraphModule, name: str) -> tuple[Schedule, Context]:
        """What passes would be given of a copy of `gm`."""
        given: list[tuple[Schedule, Context]] = []

        def note(schedule: Schedule, ctx: Context) -> Result:
            given.append((schedule, replace(ctx, dump=None)))
            return run_pipeline(schedule, replace(ctx, passes=(), stop_after=None, dump=None))

        config = replace(self.config, dump=frozenset(), debug=frozenset())
        plan_graph(
            GraphModule(gm, copied(gm.graph)),
            config=config,
            name=name,
            dumps=Dumps(config, name),
            inner=EarlierRun({}),
            passes=note,
            runs=self.runs,
            tentative=True,
        )
        return given[-1]

    def _place_on_disk(self) -> str | None:
        """Under which the choice is stored; None where it is not."""
        if not uses_disk_cache(self.config):
            return None
        try:
            devices = device_types(self.forward)
            context = environment_key(self.config), profile_text(self.config, devices), rank_in_graphs(self.config)
            return content_key(graph_key(self.forward, *context), graph_key(self.backward, *context))
        except NotCacheable as reason:
            count(f"not kept: {reason}")
            return None


def _read(place: str | None, config: Config) -> str:
    """The choice on disk; "" for none."""
    text = None if place is None else _choices(config.cache_dir).read(place, _SUFFIX)
    return "" if text is None else text.decode()


@lru_cache(None)
def _choices(root: Path) -> KernelCache:
    return KernelCache(root, "choices")
