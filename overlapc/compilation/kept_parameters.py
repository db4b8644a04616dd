"""Partitions a joint graph into forward and backward; parameters stay gathered between them within a memory budget.

Parameters that are resharded after forward are gathered again in backward. With a budget, forward and backward are
first planned like that, `planning/keep_gathered.py` chooses from the plans which parameters stay gathered, and the
joint graph is partitioned again. All ranks use the choice of the first rank. A cached choice is used if all ranks have
cached the same one.
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
from overlapc.fx.comm.collectives import find_collectives
from overlapc.fx.graph_copy import copied
from overlapc.fx.op_by_op import reason_to_run_op_by_op
from overlapc.fx.partitioning.partition import gathered_again, partition
from overlapc.fx.subgraphs import subgraphs
from overlapc.fx.versions.dynamo import ends_in_break
from overlapc.graph_names import BACKWARD, FORWARD, graph_name
from overlapc.parallel.separate_blocks import compiled_alone
from overlapc.passes.base import Context
from overlapc.planning.agreed import KEPT_GATHERS, KeptGathers, key_of, to_follow
from overlapc.planning.chosen_profile import profile_text
from overlapc.planning.copy_rules import rank_in_graphs
from overlapc.planning.dumps import Dumps
from overlapc.planning.fused_ops import device_types
from overlapc.planning.graph_planner import Planned, described
from overlapc.planning.keep_gathered import Step, kept_gathers
from overlapc.planning.plan_graph import peers_of_graph, plan_graph, without_measuring_kernels
from overlapc.planning.rank_notes import notes_of
from overlapc.report.kept_gathered import NO_BUDGET, SWITCHED_OFF, GatherChoice
from overlapc.runtime.cache import KernelCache, content_key
from overlapc.runtime.counters import count
from overlapc.runtime.phases import phase
from overlapc.schedule.model import Schedule
from overlapc.warm.environment import environment_key
from overlapc.warm.fingerprint import NotCacheable, graph_key
from overlapc.warm.loading import uses_disk_cache

_SUFFIX = ".gathers.json"
_KEY = "overlapc_gathers"  # key of the `GatherChoice` in `GraphModule.meta`


def partition_of(gm: GraphModule, config: Config, number: int, *, will_run: bool) -> Partition:
    """Return the partitioner for the joint graph of `gm`, captured by Dynamo as step `number`.

    will_run: see `plan_graph`. The partitioner attaches a `GatherChoice` to forward and backward, for the report.
    """
    return partial(_divided, config=config, number=number, will_run=will_run, captured=gm)


def _graphs_between(captured: GraphModule) -> str:
    """Return the reason why other graphs run between forward and backward of `captured`; "" if none do.

    The memory of those graphs is not known, so parameters that stay gathered meanwhile could exceed the budget.
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
    will_run: bool,
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
    reason = _graphs_between(captured) or _unfit(config, forward, backward)
    if reason:
        count(f"parameters not kept gathered: {reason}")
        return _noted((forward, backward), GatherChoice(frozenset(), gathers, f"none are kept: {reason}"))
    kept = _Choice(forward, backward, gathers, config, number, will_run).made()
    choice = GatherChoice(frozenset(kept.gathers), gathers, kept.why)
    if kept.gathers:
        count("gathers_kept_for_backward", len(kept.gathers))
        forward, backward = partition(again, joint_inputs, keep=kept.gathers, **options)
    forward.meta[KEPT_GATHERS] = kept
    return _noted((forward, backward), choice)


def _noted(graphs: tuple[GraphModule, GraphModule], choice: GatherChoice) -> tuple[GraphModule, GraphModule]:
    for graph in graphs:
        graph.meta[_KEY] = choice
    return graphs


def choice_of(gm: GraphModule) -> GatherChoice:
    """Return the choice made when the joint graph of `gm` was partitioned; an empty one if `gm` had no joint graph."""
    found: GatherChoice = gm.meta.get(_KEY, GatherChoice())
    return found


def _unfit(config: Config, *graphs: GraphModule) -> str:
    """Return the reason why plans of these graphs do not predict the cost of keeping parameters gathered; "" if they
    do."""
    if config.cuda_graphs:
        return "CUDA graphs would copy them out of forward and into backward"
    for graph in graphs:
        if next(subgraphs(graph), None) is not None:
            return "the step contains conditionals, loops or nested compile regions"
        if reason_to_run_op_by_op(graph.graph) is not None:
            return "the step runs op by op"
    return ""


@dataclass(frozen=True)
class _Choice:
    """Chooses which of `gathers` forward saves for backward."""

    forward: GraphModule
    backward: GraphModule
    gathers: Collection[str]
    config: Config
    number: int
    will_run: bool

    def made(self) -> KeptGathers:
        """Return the choice, the same on all ranks."""
        communication = described(find_collectives(self.forward.graph, self.config.safe_communication))
        peers = peers_of_graph(communication, self.config)
        if peers is None:  # ranks could choose differently, each by its own estimates
            reason = "ranks do not exchange data while compiling (see rank_check)"
            count(f"parameters not kept gathered: {reason}")
            return KeptGathers((), (), f"none are kept: {reason}", 0)
        captured = tuple((node.name, found.comm) for node, found in communication.items())
        key = key_of(KEPT_GATHERS, self.config)
        known: list[KeptGathers] = peers.agreed[key] if key is not None else []
        followed = to_follow(known, captured, peers)
        if followed is not None:  # other ranks may not be compiling now
            return followed.agreed
        meeting = partial(peers.agreement, KEPT_GATHERS, self.config.rank_timeout, notes_of(self.forward, self.config))
        place = self._place_on_disk()
        with meeting() as agreement:
            choices = agreement.exchange("parameters that stay gathered", _read(place, self.config))
        if not choices[0] or len(set(choices)) > 1:
            planned = json.dumps(self._planned())
            with meeting() as agreement:
                choices = agreement.exchange("parameters that stay gathered", planned)
            if place is not None:
                _choices(self.config.cache_dir).put(place, _SUFFIX, choices[0])
        kept, why, beside_pools_bytes = json.loads(choices[0])
        known.append(KeptGathers(captured, tuple(kept), why, beside_pools_bytes))
        return known[-1]

    def _planned(self) -> tuple[tuple[str, ...], str, int]:
        with phase("graph"):
            forward = self._schedule(self.forward, graph_name(FORWARD, self.number))
            backward = self._schedule(self.backward, graph_name(BACKWARD, self.number))
            with phase("passes"):
                step = Step.of(forward, backward)
                kept, why = kept_gathers(step, self.gathers)
                return kept, why, step.keeping(kept).beside_pools_bytes

    def _schedule(self, gm: GraphModule, name: str) -> tuple[Schedule, Context]:
        """Return the schedule of `gm` before the passes, and their context. `gm` is not changed."""
        config = replace(without_measuring_kernels(self.config), dump=frozenset(), debug=frozenset())
        planned = plan_graph(
            GraphModule(gm, copied(gm.graph)),
            config=config,
            name=name,
            dumps=Dumps(config, name),
            inner_estimates=EarlierRun({}),
            will_run=self.will_run,
            schedule_only=True,
        )
        assert isinstance(planned, Planned), "no cached graph was given"
        return planned.scheduled.schedule, planned.scheduled.context

    def _place_on_disk(self) -> str | None:
        """Return the cache key of the choice, or None if it cannot be cached."""
        if not uses_disk_cache(self.config):
            return None
        try:
            devices = device_types(self.forward)
            context = environment_key(self.config), profile_text(self.config, devices), rank_in_graphs(self.config)
            return content_key(graph_key(self.forward, *context), graph_key(self.backward, *context))
        except NotCacheable as reason:
            count(f"choice of gathered parameters not cached: {reason}")
            return None


def _read(place: str | None, config: Config) -> str:
    """Return the cached choice as JSON; "" if there is none."""
    text = None if place is None else _choices(config.cache_dir).read(place, _SUFFIX)
    return "" if text is None else text.decode()


@lru_cache(None)
def _choices(root: Path) -> KernelCache:
    return KernelCache(root, "choices")
