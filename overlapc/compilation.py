"""From an FX graph to a scheduled callable, stage by stage; `backend` is what torch calls."""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch._dynamo import disable
from torch._dynamo.utils import flatten_graph_inputs
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch.fx import GraphModule, Node

from overlapc import dump
from overlapc.binding import bind, keeps
from overlapc.codegen.parts import split
from overlapc.codegen.pool import peak_bytes, pooled
from overlapc.codegen.program import Program, build_program
from overlapc.codegen.sources import generate_kernels, kernels_of
from overlapc.config import Config
from overlapc.estimators.profile_trace import EarlierRun
from overlapc.fusion.build import op_name
from overlapc.fx.decompositions import decompositions
from overlapc.fx.partition import partition
from overlapc.fx.sizes import guessed_size
from overlapc.fx.subgraphs import is_loop, return_tuple, subgraphs
from overlapc.fx.versions import check_torch_version, compiled_autograd
from overlapc.garbage import no_collections
from overlapc.ir.ops import Extern, LoweredGraph, Start
from overlapc.lowering import provenance
from overlapc.passes.base import Context, Result, run_pipeline, select
from overlapc.planning import Passes, collective_lines, device_types, plan_graph
from overlapc.profile import profile_text
from overlapc.report import record
from overlapc.report.build import graph_record
from overlapc.report.model import GraphRecord
from overlapc.runtime.counters import count
from overlapc.runtime.deterministic import deterministic
from overlapc.runtime.support import unboxed
from overlapc.schedule.model import Kind, Schedule
from overlapc.warm import graph as warm_graph
from overlapc.warm import step as warm_step
from overlapc.warm.fingerprint import NotCacheable, environment_key, graph_key
from overlapc.warm.printed import compiled_graph

_log = logging.getLogger("overlapc")
Found = Callable[[Schedule, Context], None]


def compile_step(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, number: int, key: str | None
) -> Callable[..., Any]:
    """Forward and backward of `gm`, compiled; kept under `key` if there is one and the step is plain."""
    if compiled_autograd(gm) or not warm_step.of_plain_tensors(gm, example_inputs):
        return _compile(compile_graph, gm, example_inputs, config, number)
    watch = warm_step.StepWatch(key, config.cache_dir, example_inputs)
    return watch.watched(_compile(partial(compile_graph, watch=watch), gm, example_inputs, config, number))


def plan_step(gm: GraphModule, example_inputs: Sequence[Any], config: Config, number: int) -> Callable[..., Any]:
    """Forward and backward of `gm`, planned only: they run as they stand."""
    return _compile(_plan_only, gm, example_inputs, config, number)


def schedule_step(
    gm: GraphModule, example_inputs: Sequence[Any], config: Config, number: int, found: Found
) -> Callable[..., Any]:
    """Forward and backward of `gm` up to where passes begin: `found` is handed what these would be given."""
    return _compile(partial(_schedule_only, found=found), gm, example_inputs, config, number)


def plan_schedule(schedule: Schedule, ctx: Context) -> None:
    """The passes on what `schedule_step` found, or on one like it, recorded as a graph of this process."""
    began = time.perf_counter()
    _remember(run_pipeline(schedule, ctx), began)


def _compile(
    each: Callable[..., Callable[..., Any]], gm: GraphModule, example_inputs: Sequence[Any], config: Config, number: int
) -> Callable[..., Any]:
    """Forward and backward of `gm`, each handed to `each`."""
    check_torch_version()
    select(config.passes)  # an unknown pass is an error now, not after the first graph was lowered
    if any(isinstance(value, list | tuple | dict) for value in example_inputs):  # compiled autograd's graphs
        flat = partial(_traced, each, config=config, number=number)
        return flatten_graph_inputs(gm, example_inputs, flat)
    return _traced(each, gm, example_inputs, config=config, number=number)


def _traced(
    each: Callable[..., Callable[..., Any]], gm: GraphModule, inputs: Sequence[Any], *, config: Config, number: int
) -> Callable[..., Any]:
    """What AOTAutograd makes of `gm`, called directly.

    Not through `torch._dynamo.backends.common.aot_autograd`, which imports Inductor's scheduler and IR to ask whether
    they log: on a machine that keeps no bytecode a tenth of a cold start.
    """
    with deterministic(config.deterministic), no_collections():  # a traced graph is objects that all stay
        step = aot_module_simplified(
            gm,
            inputs,
            fw_compiler=partial(each, config=config, name=f"forward_{number}"),
            bw_compiler=_hidden(partial(each, config=config, name=f"backward_{number}")),
            inference_compiler=partial(each, config=config, name=f"inference_{number}"),
            decompositions=decompositions(native_random=not config.fallback_random),
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )
    return disable(step, reason="it is compiled")


def _hidden(compiler: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """`compiler` and what it makes, kept from Dynamo: backward may be compiled and run within what that traces."""

    def compile_backward(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return disable(disable(compiler)(*args, **kwargs), reason="it is compiled")

    return compile_backward


@dataclass(frozen=True)
class Built:
    """A compiled graph, and what a run of it takes by the simulator; None for one that runs as it stands."""

    call: Callable[[list[Any]], Any]
    step_ns: float | None
    kept: bool = False  # a later process can have it from the cache
    module: GraphModule | None = None  # the same as a graph, with wrapper="fx"


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    config: Config,
    name: str,
    watch: warm_step.StepWatch | None = None,
) -> Callable[..., Any]:
    """One graph of ATen ops and functional collectives: the whole way. `watch` sees the graphs of the step."""
    with deterministic(config.deterministic):  # backward is compiled when it first runs
        key = _graph_key(gm, config, name)
        built = _build(gm, config, name, key=key)
    if watch is not None:
        watch.compiled(name.split("_")[0], gm, built.call, key if built.kept else None)
    return built.call


def _build(
    gm: GraphModule, config: Config, name: str, *, key: str | None = None, within: bool = False, single: bool = False
) -> Built:
    """`compile_graph` as the list of its stages.

    within: another graph carries this one, and is reported. single: it returns one value, and no tuple, to that one.
    key: under which the result is looked for, and kept; None for neither.
    """
    began = time.perf_counter()
    guessed = guessed_size(gm.graph)
    if guessed is not None:
        return Built(_as_it_stands(gm, guessed), None)
    dumps = dump.Dumps(config, name)
    inner = _inner_graphs(gm, config, name, _build)
    key = None if inner else key
    kept = warm_graph.find(key, config.cache_dir) if key is not None else None
    order = None if kept is None else kept.order
    of_inner = _times_of_inner(gm, inner)
    planned = plan_graph(gm, config=config, name=name, dumps=dumps, inner=of_inner, kept_order=order)
    if planned is None:
        assert kept is not None
        return Built(bind(kept, config, name, began, gm=gm), kept.record.after.step_ns, kept=True)
    result, lowered, tuning = planned.result, planned.lowered, planned.tuning
    for constant, module in lowered.constants.items():
        if isinstance(module, GraphModule) and module in inner:
            lowered.constants[constant] = inner[module].module or inner[module].call
    sources = generate_kernels(result.schedule, lowered, tuning.sources if tuning is not None else None)
    program = build_program(result.schedule, lowered, sources, donated=_donated(result.schedule, config))
    report = graph_record(result, fallbacks=_fallbacks(result))
    if config.memory == "pool":
        program, report = _with_pool(program, report, result.schedule, lowered)
    # What is within another graph runs as a part of that one's call.
    parted = split(program) if config.cuda_graphs and not within else None
    counts = _counts(result)
    if tuning is not None:
        report = replace(report, tuned=tuning.summary())
        counts["kernels_tuned"] = len(tuning.changed)
        _log.info("%s: %s", name, tuning.summary())
    if parted is not None:
        report = replace(report, captured=parted.summary(), host_ns=None)  # which is of nodes launched one by one
        counts["cuda_graph_parts"] = len(parted.parts)
        _log.info("%s: %s", name, parted.summary())
    dumps.write("program", "program", lambda: str(program))
    if parted is not None:
        dumps.write("program", "parts", lambda: str(parted))
    dumps.write("kernels", "kernels", lambda: "\n\n".join(source.text for source in program.kernels()))
    compiled, objects = compiled_graph(
        program,
        kernels_of(sources, result.schedule),
        gm,
        report,
        counts,
        collective_lines(result.schedule),
        tracked=config.check_lifecycle,
        checks=config.checks,
        partition=parted,
    )
    graph = None
    if config.wrapper == "fx":
        from overlapc.codegen.fx import FxWrapper  # which registers an operator: not for those who do not need it

        graph = FxWrapper(program, single=single)
    call = bind(compiled, config, name, began, objects=objects, within=within, graph=graph)
    dumps.write("program", "wrapper", lambda: graph.text() if graph else compiled.text(name), suffix="py")
    kept_now = key is not None and _keep(key, compiled, config)
    return Built(call, result.after.step_ns, kept_now, graph.module if graph else None)


def _donated(schedule: Schedule, config: Config) -> set[str]:
    """Saved activations whose memory backward may go on with, unless what runs it holds its arguments."""
    if config.cuda_graphs or config.wrapper == "fx":
        return set()
    return {buffer.name for buffer in schedule.buffers.values() if buffer.freeable}


def _with_pool(
    program: Program, report: GraphRecord, schedule: Schedule, lowered: LoweredGraph
) -> tuple[Program, GraphRecord]:
    """`program` on a pool, and what its peak is then; as it was if the pool would not fit the memory budget."""
    on_pool = pooled(program)
    peak = peak_bytes(on_pool, schedule, lowered.hint)
    if schedule.budget_bytes is not None and peak > schedule.budget_bytes:
        count("pools_over_budget")
        return program, report
    return on_pool, replace(report, peak_bytes=peak)


def _plan_only(gm: GraphModule, example_inputs: Sequence[Any], *, config: Config, name: str) -> Callable[..., Any]:
    """Like compile_graph, but for fake tensors: the graph itself runs, as nothing is generated."""
    began = time.perf_counter()
    _remember(_plan(gm, config, name), began)
    return make_boxed_func(gm.forward)


def _schedule_only(
    gm: GraphModule, example_inputs: Sequence[Any], *, config: Config, name: str, found: Found
) -> Callable[..., Any]:
    """Like _plan_only, up to where passes begin."""

    def hand_over(schedule: Schedule, ctx: Context) -> Result:
        found(schedule, ctx)
        return run_pipeline(schedule, replace(ctx, passes=(), stop_after=None, dump=None))

    _plan(gm, config, name, hand_over)
    return make_boxed_func(gm.forward)


def _plan(gm: GraphModule, config: Config, name: str, passes: Passes = run_pipeline) -> Result:
    # This machine is not the one that is planned for.
    config = replace(config, measure_matmuls=False, autotune=False)
    of_inner = _times_of_inner(gm, _inner_graphs(gm, config, name, _planned_within))
    dumps = dump.Dumps(config, name)
    planned = plan_graph(gm, config=config, name=name, dumps=dumps, inner=of_inner, passes=passes)
    assert planned is not None, "there was no cache to take it from"
    return planned.result


def _planned_within(gm: GraphModule, config: Config, name: str, *, within: bool, single: bool) -> Built:
    result = _plan(gm, config, name)
    _count(result)
    return Built(make_boxed_func(gm.forward), result.after.step_ns)


def _remember(result: Result, began: float) -> None:
    _count(result)
    seconds = time.perf_counter() - began
    record.add(graph_record(result, fallbacks=_fallbacks(result), compile_seconds=seconds))


def _count(result: Result) -> None:
    for counter, times in _counts(result).items():
        count(counter, times)


def _as_it_stands(gm: GraphModule, node: Node) -> Callable[..., Any]:
    """The graph run op by op, counted and said: the sizes it was traced with cannot be relied on."""
    count("graphs_as_they_stand")
    warnings.warn(
        f"overlapc runs a graph op by op: {node.name} = {node.target} gives a size that depends on data and was traced"
        f" as a constant ({provenance(node).source or 'unknown line'})",
        stacklevel=2,
    )
    return make_boxed_func(gm.forward)


# --- graphs within graphs


def _inner_graphs(gm: GraphModule, config: Config, name: str, build: Callable[..., Built]) -> dict[GraphModule, Built]:
    """The branches and loop bodies that `gm` carries, each compiled once and called with its arguments one by one."""
    found: dict[GraphModule, Built] = {}
    for each in subgraphs(gm):
        if each.module not in found:
            single = return_tuple(each.module)
            built = build(each.module, config, f"{each.name}_of_{name}", within=True, single=single)
            found[each.module] = Built(unboxed(built.call, single), built.step_ns, module=built.module)
    return found


def _times_of_inner(gm: GraphModule, inner: Mapping[GraphModule, Built]) -> EarlierRun:
    """What calls of inner graphs take: a conditional its longer branch; how often a loop runs nobody knows."""
    times: dict[str, list[float | None]] = {}
    for each in subgraphs(gm):
        times.setdefault(each.reader.name, []).append(None if is_loop(each.reader) else inner[each.module].step_ns)
    known = {node: [ns for ns in all_ns if ns is not None] for node, all_ns in times.items() if None not in all_ns}
    return EarlierRun({node: ("", max(all_ns)) for node, all_ns in known.items()}, name="simulated branches")


# --- report


def _fallbacks(result: Result) -> dict[str, int]:
    """Calls for want of a lowering, by op."""
    found: Counter[str] = Counter()
    for node in result.schedule.nodes:
        op = node.payload.call if isinstance(node.payload, Start) else node.payload
        if isinstance(op, Extern) and op.fallback:
            found[op_name(op.target)] += 1
    return dict(found)


def _counts(result: Result) -> dict[str, int]:
    """What one compiled graph adds to `counters["overlapc"]`."""
    kinds = Counter(node.kind for node in result.schedule.nodes)
    fallbacks = _fallbacks(result)
    return {
        "graphs": 1,
        "kernels": kinds[Kind.KERNEL],
        "externs": kinds[Kind.EXTERN] - sum(fallbacks.values()),
        "collectives": kinds[Kind.START] + kinds[Kind.COMM],
        "fallbacks": sum(fallbacks.values()),
        **{f"fallback {name}": times for name, times in fallbacks.items()},
    }


# --- warm start


def _graph_key(gm: GraphModule, config: Config, name: str) -> str | None:
    """The same for one graph of ATen ops."""
    if not keeps(config):
        return None
    try:
        profile = profile_text(config, device_types(gm))
        return graph_key(gm, name.split("_")[0], environment_key(config), profile)
    except NotCacheable as reason:
        count(f"not kept: {reason}")
        return None


def _keep(key: str, compiled: warm_graph.CompiledGraph, config: Config) -> bool:
    try:
        warm_graph.keep(key, compiled, config.cache_dir)
    except NotCacheable as reason:
        count(f"not kept: {reason}")
        return False
    return True
