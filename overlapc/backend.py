"""The `torch.compile` backend: from an FX graph to a scheduled callable, stage by stage."""

from __future__ import annotations

import itertools
import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import ShortenTraceback
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule, Node

from overlapc import dump
from overlapc.chain import chain_of
from overlapc.codegen import kernel as codegen
from overlapc.codegen.bucket import merge_starts
from overlapc.codegen.fx import FxWrapper
from overlapc.codegen.kernel import KernelSource
from overlapc.codegen.pool import peak_bytes, pooled
from overlapc.codegen.program import Program, build_program
from overlapc.config import Config
from overlapc.errors import CompileError, OverlapcError
from overlapc.estimators.agreement import Compilation, party
from overlapc.estimators.base import Estimator, estimate_schedule
from overlapc.estimators.canonical import canonical_lines
from overlapc.estimators.device import DeviceProfile, profile_to_json
from overlapc.estimators.profile_trace import EarlierRun
from overlapc.fusion import fuse_ops
from overlapc.fusion.build import op_name, to_schedule
from overlapc.fx.collectives import GroupNames, canonicalize, find_collectives
from overlapc.fx.control import inline_control_deps
from overlapc.fx.decompositions import decompositions
from overlapc.fx.fsdp2 import clean_up
from overlapc.fx.pack import CopyCosts, pack
from overlapc.fx.partition import partition
from overlapc.fx.random import draw_once
from overlapc.fx.sizes import guessed_size
from overlapc.fx.subgraphs import is_loop, return_tuple, subgraphs
from overlapc.fx.versions import check_torch_version, runs_under_fsdp2
from overlapc.ir.ops import Combo, Extern, Loops, LoweredGraph, Start, loops_of, tree_leaves
from overlapc.lowering import Communication, lower, provenance
from overlapc.lowering.product import Product
from overlapc.measured_fusion import KernelTimes
from overlapc.measured_products import ProductTimes, choice
from overlapc.passes.base import Context, Result, run_pipeline, select
from overlapc.report import record
from overlapc.report.build import graph_record
from overlapc.report.drawing import to_dot
from overlapc.report.walk import walk_through
from overlapc.runtime import triton_workers
from overlapc.runtime.counters import count
from overlapc.runtime.deterministic import deterministic, deterministically
from overlapc.runtime.support import unboxed
from overlapc.schedule.model import Estimate, Kind, Schedule
from overlapc.warm import graph as warm_graph
from overlapc.warm import step as warm_step
from overlapc.warm.fingerprint import NotCacheable, environment_key, graph_key, user_graph_key

_numbers = itertools.count()


def overlapc(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | Config | None = None
) -> Callable[..., Any]:
    """What `torch.compile(backend="overlapc", options=…)` calls for every graph that Dynamo captures.

    Raises ConfigError for options it cannot use, CompileError with the FX node and the user's line for a graph it
    cannot compile, RanksDisagree when ranks compile different graphs.
    """
    try:
        config = Config.of(options)
        if runs_under_fsdp2():
            _advise_adoption()
        number = next(_numbers)
        key = _step_key(gm, example_inputs, config)
        kept = warm_step.find(key, config.cache_dir) if key is not None else None  # type: ignore[arg-type]
        if kept is not None:
            return warm_step.bound(*kept, partial(_from_cache, config=config, number=number))
        watch = warm_step.StepWatch(key, config.cache_dir)  # type: ignore[arg-type]
        return watch.watched(_compile(partial(compile_graph, watch=watch), gm, example_inputs, config, number))
    except OverlapcError as error:
        raise _direct(error) from error.__cause__


def plan_only(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | Config | None = None
) -> Callable[..., Any]:
    """A backend that plans and records a graph on fake tensors, for `overlapc plan`; no kernel is generated."""
    try:
        return _compile(_plan_only, gm, example_inputs, Config.of(options), next(_numbers))
    except OverlapcError as error:
        raise _direct(error) from error.__cause__


def _compile(
    each: Callable[..., Callable[..., Any]], gm: GraphModule, example_inputs: Sequence[Any], config: Config, number: int
) -> Callable[..., Any]:
    """Forward and backward of `gm`, each handed to `each`."""
    check_torch_version()
    select(config.passes)  # an unknown pass is an error now, not after the first graph was lowered
    if each is not _plan_only and any(isinstance(value, torch.Tensor) and value.is_cuda for value in example_inputs):
        triton_workers.start()  # they are ready once there is something to compile
    with deterministic(config.deterministic):
        return _aot(each, config, number)(gm, example_inputs)


def _aot(each: Callable[..., Callable[..., Any]], config: Config, number: int) -> Callable[..., Callable[..., Any]]:
    return aot_autograd(
        fw_compiler=partial(each, config=config, name=f"forward_{number}"),
        bw_compiler=partial(each, config=config, name=f"backward_{number}"),
        inference_compiler=partial(each, config=config, name=f"inference_{number}"),
        decompositions=decompositions(native_random=not config.fallback_random),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


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
    kept = warm_graph.find(key, config.cache_dir) if key is not None else None  # type: ignore[arg-type]
    planned = plan_graph(gm, config=config, name=name, dumps=dumps, inner=inner, kept=kept)
    if planned is None:
        assert kept is not None
        return Built(_run(kept, config, name, began, gm=gm), kept.record.after.step_ns, kept=True)
    result, lowered = planned
    for constant, module in lowered.constants.items():
        if isinstance(module, GraphModule) and module in inner:
            lowered.constants[constant] = inner[module].module or inner[module].call
    sources = generate_kernels(result.schedule, lowered)
    program = build_program(result.schedule, lowered, sources)
    report = graph_record(result, fallbacks=_fallbacks(result))
    if config.memory == "pool":
        program, report = _with_pool(program, report, result.schedule, lowered)
    dumps.write("program", "program", lambda: str(program))
    dumps.write("kernels", "kernels", lambda: "\n\n".join(source.text for source in program.kernels()))
    compiled, objects = warm_graph.compiled_graph(
        program,
        _kernels(sources, result.schedule),
        gm,
        report,
        _counts(result),
        collective_lines(result.schedule),
        tracked=config.check_lifecycle,
        checks=config.checks,
    )
    graph = FxWrapper(program, single=single) if config.wrapper == "fx" else None
    call = _run(compiled, config, name, began, objects=objects, within=within, graph=graph)
    dumps.write("program", "wrapper", lambda: graph.text() if graph else compiled.text(name), suffix="py")
    kept_now = key is not None and _keep(key, compiled, config)
    return Built(call, result.after.step_ns, kept_now, graph.module if graph else None)


def _with_pool(
    program: Program, report: record.GraphRecord, schedule: Schedule, lowered: LoweredGraph
) -> tuple[Program, record.GraphRecord]:
    """`program` on a pool, and what its peak is then; as it was if the pool would not fit the memory budget."""
    on_pool = pooled(program)
    peak = peak_bytes(on_pool, schedule, lowered.hint)
    if schedule.budget_bytes is not None and peak > schedule.budget_bytes:
        count("pools_over_budget")
        return program, report
    return on_pool, replace(report, peak_bytes=peak)


def _run(
    compiled: warm_graph.CompiledGraph,
    config: Config,
    name: str,
    began: float,
    *,
    objects: Mapping[str, Any] | None = None,
    gm: GraphModule | None = None,
    within: bool = False,
    graph: FxWrapper | None = None,
) -> Callable[[list[Any]], Any]:
    """A compiled graph made callable, counted and reported under the name it has in this process.

    graph: what runs instead of the generated function.
    """
    for device_type, _ in compiled.kernels:
        _import_generator(device_type)
    named = compiled.named(name)
    plain = graph.bind if graph else None
    call = deterministically(named.bind(config.cache_dir, objects, gm, plain), config.deterministic)  # type: ignore[arg-type]
    for counter, times in named.counts.items():
        count(counter, times)
    if not within:
        record.add(replace(named.record, compile_seconds=time.perf_counter() - began))
    return call


def plan_graph(
    gm: GraphModule,
    *,
    config: Config,
    name: str,
    dumps: dump.Dumps,
    inner: Mapping[GraphModule, Built],
    kept: warm_graph.CompiledGraph | None = None,
) -> tuple[Result, LoweredGraph] | None:
    """The stages up to the final schedule, before any code is generated. `inner`: the graphs that `gm` carries.

    kept: this graph as it was compiled before. If every rank has it with the same order of collectives there is
    nothing to plan, and None is returned.
    """
    inline_control_deps(gm)
    clean_up(gm)
    canonicalize(gm)
    draw_once(gm.graph)
    dumps.write("fx", "graph", lambda: gm.print_readable(print_output=False))
    communication = _communication(gm, config.safe_communication)  # type: ignore[arg-type]
    with _together(gm, communication, config, name) as talks:
        if talks is not None:
            names = GroupNames(gm.graph)
            brought = "" if kept is None else kept.order
            if not talks.agree_on_graph(canonical_lines(gm.graph, names.__getitem__), brought):
                kept = None
        if kept is not None:
            return None
        profile = _profile(config, _device_types(gm))
        if talks is not None:
            profile = talks.agree_on_profile(profile)
        if pack(gm, _copy_costs(profile)):
            dumps.write("fx", "packed", lambda: gm.print_readable(print_output=False))
            communication = _communication(gm, config.safe_communication)  # type: ignore[arg-type]
        lowered = _lowered(gm, name, config, communication, talks)
        dumps.write("ir", "lowered", lambda: str(lowered))
        freeable = _freeable(gm, name)
        # Measured on one rank, fusions of other ranks would differ, and with them what ranks compare.
        measured = config.benchmark_fusion and talks is None and not torch.are_deterministic_algorithms_enabled()
        measure = KernelTimes(lowered, config.cache_dir) if measured else None  # type: ignore[arg-type]
        ops, fusion = fuse_ops(lowered, enabled=config.fusion, freeable=freeable, measure=measure)
        dumps.write("fusion", "decisions", lambda: str(fusion))
        schedule = to_schedule(
            ops,
            lowered,
            freeable,
            config.memory_budget,  # type: ignore[arg-type]
            fusion.kernel_of,
        )
        chain = chain_of(profile, config, lowered, _times_of_inner(gm, inner))
        schedule = _estimated(schedule, chain, talks)
        result = run_pipeline(schedule, _context(config, profile, chain, dumps))
        dumps.write("passes", "walk", lambda: walk_through(result.after))
        dumps.write("passes", "schedule", lambda: to_dot(result.schedule), suffix="dot")
        if talks is not None:
            talks.agree_on_order(collective_lines(result.schedule))
    return result, lowered


def _plan_only(gm: GraphModule, example_inputs: Sequence[Any], *, config: Config, name: str) -> Callable[..., Any]:
    """Like compile_graph, but for fake tensors: the graph itself runs, as nothing is generated."""
    return _planned(gm, config, name).call


def _planned(gm: GraphModule, config: Config, name: str, *, within: bool = False, single: bool = False) -> Built:
    began = time.perf_counter()
    config = replace(config, measure_matmuls=False)  # this machine is not the one that is planned for
    inner = _inner_graphs(gm, config, name, _planned)
    planned = plan_graph(gm, config=config, name=name, dumps=dump.Dumps(config, name), inner=inner)
    assert planned is not None, "there was no cache to take it from"
    result = planned[0]
    for counter, times in _counts(result).items():
        count(counter, times)
    if not within:
        seconds = time.perf_counter() - began
        record.add(graph_record(result, fallbacks=_fallbacks(result), compile_seconds=seconds))
    return Built(make_boxed_func(gm.forward), result.after.step_ns)


def _advise_adoption() -> None:
    warnings.warn(
        "overlapc compiles a module in the forward of FSDP2's fully_shard, whose gathers and reductions run in hooks"
        " that Dynamo does not trace: they stay outside of the graph, and nothing can be scheduled around them.\n"
        "hint: model = overlapc.adopt_fsdp2(model) before torch.compile takes the model over as it is",
        stacklevel=2,
    )


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


# --- communication and agreement


def _communication(gm: GraphModule, safe: frozenset[str]) -> dict[Node, Communication]:
    return {
        found.start: Communication(found.comm, asynchronous=not found.synchronous)
        for found in find_collectives(gm.graph, safe)
    }


@dataclass
class _together:
    """The talks with the ranks that compile this graph too; None when it does not communicate."""

    gm: GraphModule
    communication: Mapping[Node, Communication]
    config: Config
    name: str

    def __enter__(self) -> Compilation | None:
        self.talks: Compilation | None = None
        if self.config.rank_check and self.communication and dist.is_initialized():
            groups = {found.comm.ranks for found in self.communication.values() if found.comm.ranks}
            ranks = spanned_ranks(dist.get_rank(), groups, dist.get_world_size())
            label = self.name.split("_")[0]
            self.talks = party(ranks).compilation(label, self.config.rank_timeout).__enter__()
        return self.talks

    def __exit__(self, *error: Any) -> None:
        if self.talks is not None:
            self.talks.__exit__(*error)


def spanned_ranks(rank: int, groups: set[tuple[int, ...]], world_size: int) -> tuple[int, ...]:
    """The ranks that compile a graph which communicates over `groups`, the same on all of them.

    On a device mesh every rank sees its own row and its own column; together they span the same grid. Where they
    do not (groups that lie on no grid), all ranks of the job.
    """
    span = {rank}
    for group in groups:
        span = {at + other - rank for at in span for other in group}
    if min(span) < 0 or max(span) >= world_size:
        return tuple(range(world_size))
    return tuple(sorted(span))


def collective_lines(schedule: Schedule) -> list[str]:
    """One line per launch in execution order, equal on all ranks when the orders are."""
    return [
        f"{node.comm.collective} {node.name} @{node.comm.group}({node.comm.size}) {node.comm.bytes}B"
        for node in schedule.nodes
        if node.kind in (Kind.START, Kind.COMM) and node.comm is not None
    ]


# --- lowering and estimates


def _generates(config: Config, device: torch.device) -> bool:
    if not config.native:
        return False
    _import_generator(device.type)
    return codegen.has_generator(device.type)


def _lowered(
    gm: GraphModule,
    name: str,
    config: Config,
    communication: Mapping[Node, Communication],
    talks: Compilation | None,
) -> LoweredGraph:
    """The graph in loop IR, matrix products as the configuration wants them."""

    def walk(native: Callable[[Product], bool]) -> LoweredGraph:
        return lower(gm, name, partial(_generates, config), communication.get, native)

    measured = config.matmul == "autotune" and not torch.are_deterministic_algorithms_enabled()
    if not measured or "cuda" not in _device_types(gm):
        return walk(lambda product: config.matmul == "native")
    met: list[Product] = []

    def note(product: Product) -> bool:
        met.append(product)
        return False

    walk(note)  # once to see which there are
    times = ProductTimes(torch.device("cuda", torch.cuda.current_device()), config.cache_dir)(met)  # type: ignore[arg-type]
    if talks is not None:
        times = talks.agree_on_medians(times)
    return walk(choice(times))


def _import_generator(device_type: str) -> None:
    """Generators of ours register when they are imported; others are registered by who brings them."""
    if device_type == "cpu":
        import overlapc.codegen.cpp
    elif device_type == "cuda":
        import overlapc.codegen.triton  # noqa: F401


def _freeable(gm: GraphModule, name: str) -> set[str]:
    """Inputs that nobody but the graph holds: what forward saved for backward, less parameters and inputs."""
    if not name.startswith("backward"):
        return set()
    names = {node.name for node in gm.graph.nodes if node.op == "placeholder"}
    return {each for each in names if not each.startswith(("primals_", "tangents_"))}


def _device_types(gm: GraphModule) -> set[str]:
    values = tree_leaves([node.meta.get("val") for node in gm.graph.nodes])
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def _profile(config: Config, device_types: Collection[str]) -> DeviceProfile:
    from overlapc.estimators.calibrate import profile_for
    from overlapc.estimators.device import load_profile

    if config.profile is not None:
        return load_profile(config.profile)
    if torch.are_deterministic_algorithms_enabled():  # what is measured here differs from run to run
        return load_profile("h200-nvlink" if "cuda" in device_types else "cpu-gloo")
    return profile_for("cuda" if "cuda" in device_types else "cpu", config.cache_dir)  # type: ignore[arg-type]


def _estimated(schedule: Schedule, chain: Estimator, talks: Compilation | None) -> Schedule:
    """`schedule` with estimates that are the same on every rank: the median of what each would say."""
    schedule = estimate_schedule(schedule, chain).schedule
    if talks is not None:
        known = {node.name: node.estimate for node in schedule.nodes if node.estimate is not None}
        agreed = talks.agree_on_medians({name: estimate.ns for name, estimate in known.items()})
        schedule = schedule.with_estimates({name: Estimate(agreed[name], known[name].source) for name in known})
    return schedule


def _copy_costs(profile: DeviceProfile) -> CopyCosts:
    byte_ns = 1e9 / profile.memory_bytes_per_s if profile.memory_bytes_per_s else 0.0
    return CopyCosts(profile.coalesced_tensor_ns, profile.kernel_floor_ns, byte_ns)


def _context(config: Config, profile: DeviceProfile, chain: Estimator, dumps: dump.Dumps) -> Context:
    return Context(
        profile=profile,
        peak_increase=config.peak_increase,
        reorder_collectives=config.reorder_collectives,
        overlap_margin=config.overlap_margin,
        stop_after=config.stop_after,
        estimate=chain.estimate,
        merge_payloads=merge_starts,
        passes=config.passes,
        verify=config.verify,
        check_memory=config.check_memory,
        dump=dumps.writer("passes"),
    )


# --- kernels


def generate_kernels(schedule: Schedule, graph: LoweredGraph) -> dict[str, KernelSource]:
    """Source of every generated kernel, by the name of its op."""
    sources = {}
    for node in schedule.nodes:
        op = node.payload
        if not isinstance(op, Loops | Combo):
            continue
        generator = codegen.generator_for(op.device.type)
        for part in loops_of(op):
            reason = generator.refuse(part.body)
            if reason is not None:
                raise CompileError(
                    f"cannot generate a kernel for {' '.join(part.origin.fx)}: {reason}\n   at {part.origin.source}\n"
                    'hint: options={"native": False} runs every op as it stands; please report this graph'
                )
        comment = f"{' '.join(op.origin.fx)} | {op.origin.source}"
        if isinstance(op, Combo):
            sources[op.name] = generator.combine([part.body for part in op.parts], _hint(op), comment)
        else:
            sources[op.name] = generator.generate(op.body, _hint(op), comment, graph.size_hints)
    return sources


def _hint(op: Loops | Combo) -> str:
    """`mul_rsqrt_sum`: the distinct ops in it, as a readable part of the kernel's name."""
    names = dict.fromkeys(re.sub(r"_?\d+$", "", name).strip("_") for name in op.origin.fx)
    return "_".join(list(names)[:6])


def _kernels(sources: Mapping[str, KernelSource], schedule: Schedule) -> list[tuple[str, KernelSource]]:
    """(device type, source) of every kernel once, by first launch."""
    found: dict[str, tuple[str, KernelSource]] = {}
    for node in schedule.nodes:
        if isinstance(node.payload, Loops | Combo):
            source = sources[node.payload.name]
            found.setdefault(source.name, (node.payload.device.type, source))
    return list(found.values())


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


def _keeps(config: Config) -> bool:
    """Whether compiled graphs go to disk: not where somebody wants to see the stages, or the graph itself."""
    return bool(config.warm_start) and not (config.dump or config.debug) and config.wrapper == "python"


def _step_key(gm: GraphModule, inputs: Sequence[Any], config: Config) -> str | None:
    """Under which the whole step is kept; None when it must be compiled each time."""
    if not _keeps(config):
        return None
    try:
        devices = {value.device.type for value in inputs if isinstance(value, torch.Tensor)}
        return user_graph_key(gm, inputs, "step", environment_key(config), _profile_text(config, devices))
    except NotCacheable:
        return None


def _graph_key(gm: GraphModule, config: Config, name: str) -> str | None:
    """The same for one graph of ATen ops."""
    if not _keeps(config):
        return None
    try:
        profile = _profile_text(config, _device_types(gm))
        return graph_key(gm, name.split("_")[0], environment_key(config), profile)
    except NotCacheable as reason:
        count(f"not kept: {reason}")
        return None


def _profile_text(config: Config, device_types: Collection[str]) -> str:
    return json.dumps(profile_to_json(_profile(config, device_types)))


def _from_cache(compiled: warm_graph.CompiledGraph, *, config: Config, number: int) -> Callable[[list[Any]], Any]:
    kind = compiled.name.split("_")[0]
    return _run(compiled, config, f"{kind}_{number}", time.perf_counter())


def _keep(key: str, compiled: warm_graph.CompiledGraph, config: Config) -> bool:
    try:
        warm_graph.keep(key, compiled, config.cache_dir)  # type: ignore[arg-type]
    except NotCacheable as reason:
        count(f"not kept: {reason}")
        return False
    return True


def _direct(error: OverlapcError) -> OverlapcError:
    """`error` in a class that Dynamo hands to the user as it is, and that is still caught by its own name."""
    kind, text = type(error), str(error)
    if isinstance(error, ShortenTraceback):
        return error
    # Dynamo appends hints about itself to `args`; our message says all there is to say.
    fixed = {"__module__": kind.__module__, "__str__": lambda self: text}
    made: OverlapcError = type(kind.__name__, (kind, ShortenTraceback), fixed)(text, first_useful_frame=None)
    return made
