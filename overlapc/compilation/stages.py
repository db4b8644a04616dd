"""Compiles an FX graph to a scheduled callable, stage by stage; torch calls `backend`, which calls this module."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule, Node

from overlapc.codegen.arena import in_arena, peak_bytes
from overlapc.codegen.copies import peak_with_pools, stored_copies
from overlapc.codegen.generated import Generated
from overlapc.codegen.parts import split
from overlapc.codegen.program import Program
from overlapc.codegen.program_builder import build_program
from overlapc.codegen.sources import generate_kernels, kernels_of
from overlapc.compilation.inner_graphs import Built, inner_graphs, times_of_inner
from overlapc.compilation.kept_parameters import choice_of, partition_of
from overlapc.compilation.recording import counts_of, record_of
from overlapc.compilation.tracing import step_of
from overlapc.config import Config
from overlapc.fx.captured.layout_inputs import without_layout_inputs
from overlapc.fx.comm.collectives import communicates
from overlapc.fx.op_by_op import reason_to_run_op_by_op
from overlapc.fx.versions.dynamo import compiled_autograd, note_collectives
from overlapc.fx.versions.graphs import use_real_objects
from overlapc.graph_names import FORWARD, INFERENCE, kind_of
from overlapc.ir.ops import LoweredGraph
from overlapc.lowering import provenance
from overlapc.planning.chosen_profile import profile_text
from overlapc.planning.copy_rules import rank_in_graphs
from overlapc.planning.dumps import Dumps
from overlapc.planning.fused_ops import device_types
from overlapc.planning.graph_planner import Planned, freeable_inputs
from overlapc.planning.plan_graph import Reused, plan_graph
from overlapc.report import record
from overlapc.report.held_memory import inputs
from overlapc.report.kept_gathered import GatherChoice
from overlapc.report.model import GraphRecord
from overlapc.runtime.counters import count
from overlapc.runtime.deterministic import deterministic
from overlapc.runtime.phases import phase
from overlapc.schedule.model import Schedule
from overlapc.units import human_bytes
from overlapc.warm import cached_graph
from overlapc.warm.environment import environment_key
from overlapc.warm.fingerprint import NotCacheable, graph_key
from overlapc.warm.loading import Agree, make_callable, uses_disk_cache
from overlapc.warm.watch import StepWatch

_log = logging.getLogger("overlapc")


def compile_step(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    number: int,
    key: str | None,
    agree: Agree | None = None,
) -> Callable[..., Any]:
    """Compile forward and backward of `gm`. With a `key`, the step is cached under it if a later process can use it.

    agree: called without graphs, before any graph is planned, if the step communicates and this rank has not cached it.
    """
    divide = partition_of(gm, config, number, will_run=True)
    if compiled_autograd(gm):
        return step_of(compile_graph, gm, example_inputs, config, number, divide)
    without, rest = without_layout_inputs(gm)
    if without is not gm:
        step = compile_step(without, [example_inputs[at] for at in rest], config, number, key, agree)
        return lambda *inputs: step(*[inputs[at] for at in rest])
    watch = StepWatch(gm, example_inputs, key, config.cache_dir)

    def noting(use: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """Return `use`, which takes a graph, with a look at the graph before it. The first graph of a step, the joint
        one or that of inference, has all its collectives."""

        def call(graph: GraphModule, *arguments: Any, **options: Any) -> Any:
            if not watch.communicates and communicates(graph.graph):
                watch.communicates = True
                if agree is not None:
                    agree(kind, ())
            return use(graph, *arguments, **options)

        return call

    compile_watched = noting(partial(compile_graph, watch=watch), INFERENCE)
    return watch.watched(step_of(compile_watched, gm, example_inputs, config, number, noting(divide, FORWARD)))


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    config: Config,
    name: str,
    watch: StepWatch | None = None,
) -> Callable[..., Any]:
    """Compile one graph of ATen ops and functional collectives. `watch` is told of each graph of the step."""
    with phase("graph"), deterministic(config.deterministic):  # backward is compiled when it first runs
        use_real_objects(gm)
        if communicates(gm.graph):
            note_collectives()
        key = _graph_key(gm, config, name)
        built = _build(gm, config, name, key=key)
    if watch is not None:
        watch.compiled(kind_of(name), gm, built.call, key if built.cached else None)
    return built.call


def _build(
    gm: GraphModule, config: Config, name: str, *, key: str | None = None, is_inner: bool = False, single: bool = False
) -> Built:
    """Run the stages of `compile_graph`.

    key: cache key of the graph; None to neither load nor store it.
    is_inner: whether this is an inner graph of another one, which is reported instead.
    single: it returns one value to that graph rather than a tuple.
    """
    began = time.perf_counter()
    uncompilable = reason_to_run_op_by_op(gm.graph)
    if uncompilable is not None:
        return Built(_uncompiled(gm, *uncompilable), None)
    dumps = Dumps(config, name)
    inner = inner_graphs(gm, config, name, _build)
    key = None if inner else key
    cached = cached_graph.find(key, config.cache_dir) if key is not None else None
    of_inner = times_of_inner(gm, inner)
    planned = plan_graph(
        gm, config=config, name=name, dumps=dumps, inner_estimates=of_inner, cached=cached, is_inner=is_inner
    )
    if isinstance(planned, Reused):
        assert cached is not None
        with phase("kernels"):
            call = make_callable(cached, config, name, began, gm=gm, found="graph", copies=planned.copies)
        return Built(call, cached.record.after.step_ns, cached=True)
    with phase("code"):
        generated = _generate(planned, inner, config, is_inner, choice_of(gm))
        compiled, objects = generated.printed(gm, tracked=config.check_lifecycle, checks=config.checks)
    _dump(generated, dumps)
    graph = None
    if config.wrapper == "fx":
        from overlapc.codegen.fx import FxWrapper  # imported only when needed, because it registers an operator

        graph = FxWrapper(generated.program, single=single)
    with phase("kernels"):
        call = make_callable(compiled, config, name, began, objects=objects, is_inner=is_inner, graph=graph)
    dumps.write("program", "wrapper", lambda: graph.text() if graph else compiled.text(name), suffix="py")
    stored = key is not None and _store(key, compiled, config)
    return Built(call, planned.result.after.step_ns, stored, graph.module if graph else None)


def _dump(generated: Generated, dumps: Dumps) -> None:
    dumps.write("program", "program", lambda: str(generated.program))
    if generated.parts is not None:
        dumps.write("program", "parts", lambda: str(generated.parts))
    dumps.write("kernels", "kernels", lambda: "\n\n".join(source.text for source in generated.program.kernels()))


def _generate(
    planned: Planned, inner: Mapping[GraphModule, Built], config: Config, is_inner: bool, choice: GatherChoice
) -> Generated:
    """Generate the kernels, and the program that launches them."""
    result, lowered, tuning = planned.result, planned.scheduled.lowered, planned.scheduled.tuning
    schedule = result.schedule
    for constant, module in lowered.constants.items():
        if isinstance(module, GraphModule) and module in inner:
            lowered.constants[constant] = inner[module].module or inner[module].call
    sources = generate_kernels(schedule, planned.scheduled.sources)
    program = build_program(schedule, lowered, sources, donated=_donated(schedule, config), copies=planned.copies)
    report = _with_shared_memory(record_of(result, choice, planned), planned)
    if config.memory == "pool":
        program, report = _with_arena(program, report, schedule, lowered)
    # An inner graph is not split: it runs as part of a call of the outer graph.
    parts = split(program) if config.cuda_graphs and not is_inner else None
    counts = counts_of(result, planned)
    if planned.copies:
        counts["collectives_by_copies"] = len(planned.copies)
    if planned.not_copied:
        counts["collectives_not_by_copies"] = len(planned.not_copied)
    if tuning is not None:
        report = replace(report, tuned=tuning.summary())
        counts["kernels_tuned"] = len(tuning.changed)
        _log.info("%s: %s", schedule.name, report.tuned)
    if parts is not None:
        # `host_ns` is the host time of nodes that are launched one by one, so it does not hold for captured parts.
        report = replace(report, captured=parts.summary(), host_ns=None)
        counts["cuda_graph_parts"] = len(parts.parts)
        _log.info("%s: %s", schedule.name, report.captured)
    kernels, order = kernels_of(sources, schedule), planned.order.lines
    copies, divided = stored_copies(planned.copies), list(planned.transports.divided.values())
    return Generated(program, kernels, parts, report, counts, order, planned.agreed, copies, divided)


def _donated(schedule: Schedule, config: Config) -> set[str]:
    """Return the saved activations whose memory backward may reuse; none if the caller keeps the arguments alive."""
    if config.cuda_graphs or config.wrapper == "fx":
        return set()
    return {buffer.name for buffer in schedule.buffers.values() if buffer.freeable}


def _with_shared_memory(report: GraphRecord, planned: Planned) -> GraphRecord:
    """Return `report` with the shared memory for copies added to the peak."""
    pools = {copied.copies.pool.name: copied.copies.pool.bytes for copied in planned.copies.values()}
    shared = sum(pools.values())
    peak = peak_with_pools(planned.result.schedule, shared)  # pools of other graphs may be larger
    budget = planned.result.schedule.budget_bytes
    if budget is not None and peak > budget:
        count("copies_over_budget")
        warnings.warn(
            f"{report.name}: the shared memory for copies ({human_bytes(shared)}) raises the peak to"
            f" {human_bytes(peak)}, over memory_budget"
            '\nhint: options={"transport": "nccl"} shares no memory; smaller units of fully_shard share less',
            stacklevel=2,
        )
    return replace(report, pool_bytes=shared, peak_bytes=peak)


def _with_arena(
    program: Program, report: GraphRecord, schedule: Schedule, lowered: LoweredGraph
) -> tuple[Program, GraphRecord]:
    """Return `program` with its buffers in an arena, and `report` with its peak; both unchanged if the arena would
    exceed the memory budget."""
    in_one = in_arena(program)
    peak = peak_bytes(in_one, schedule, lowered.hint) + report.pool_bytes
    if schedule.budget_bytes is not None and peak > schedule.budget_bytes:
        count("arenas_over_budget")
        return program, report
    return in_one, replace(report, peak_bytes=peak)


def _uncompiled(gm: GraphModule, node: Node, why: str) -> Callable[..., Any]:
    """Return a function that runs the graph op by op, and warn that it does because of `node`."""
    count("graphs_run_op_by_op")
    warnings.warn(f"overlapc runs a graph op by op: {why} ({provenance(node).source or 'unknown line'})", stacklevel=2)
    return make_boxed_func(gm.forward)


def _graph_key(gm: GraphModule, config: Config, name: str) -> str | None:
    """Return the cache key of a graph of ATen ops, or None if it cannot be cached."""
    if not uses_disk_cache(config):
        return None
    try:
        context = environment_key(config), profile_text(config, device_types(gm)), rank_in_graphs(config)
        # A budget covers forward and backward together, so the plan of backward depends on the memory of forward.
        forward = None if config.memory_budget is None else record.forward(name)
        memory = ""
        if forward is not None:
            given = {name: buffer.bytes for name, buffer in inputs(forward).items()}
            memory = str((given, forward.peak_bytes, forward.pool_bytes))
        freeable = str(sorted(freeable_inputs(gm, name)))  # equal graphs differ in what the caller keeps
        return graph_key(gm, kind_of(name), *context, memory, freeable, choice_of(gm).why)
    except NotCacheable as reason:
        count(f"graph not cached: {reason}")
        return None


def _store(key: str, compiled: cached_graph.CompiledGraph, config: Config) -> bool:
    try:
        cached_graph.store(key, compiled, config.cache_dir)
    except NotCacheable as reason:
        count(f"graph not cached: {reason}")
        return False
    return True
