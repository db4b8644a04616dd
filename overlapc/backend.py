"""The `torch.compile` backend: loads a step that an earlier process compiled, and leaves all other work to
`compilation/`.

It imports only what a warm start needs: the compiler is ten times as large as the code that runs its results.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._dynamo.exc import ShortenTraceback
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node

from overlapc.config import Config
from overlapc.errors import ConfigError, OverlapcError
from overlapc.fx.captured import untraceable_changes, untraceable_ops
from overlapc.fx.captured.addcdiv import restore_addcdiv
from overlapc.fx.captured.function_results import separate_results
from overlapc.fx.versions.dynamo import compile_id, compiled_autograd
from overlapc.fx.versions.graphs import copied_capture
from overlapc.fx.versions.sharding import runs_under_ddp, runs_under_fsdp2
from overlapc.parallel.results_that_reduce import copy_all_results, copy_results_that_reduce, only_reduces
from overlapc.report.captures import CAPTURES
from overlapc.runtime import triton_workers
from overlapc.runtime.async_inputs import arrived, not_waited_for, plain_examples, tensors_of_tensors, waits_first
from overlapc.runtime.counters import count
from overlapc.runtime.input_offsets import InputPlaces, always_eagerly, eagerly_elsewhere, why_untraceable
from overlapc.runtime.native_launcher import host_launcher_type
from overlapc.runtime.steps import watch_optimizers
from overlapc.warm.fingerprint import NotCacheable, user_graph_key
from overlapc.warm.loading import Agree, environment_of, load_step, next_number, uses_disk_cache

if TYPE_CHECKING:  # parts of the compiler
    from overlapc.codegen.compiled_graph import CompiledGraph
    from overlapc.passes.base import Context
    from overlapc.runtime.copies.pool import GraphCopies
    from overlapc.schedule.model import Schedule

_ADOPT = (
    "call `model = overlapc.adopt_fsdp2(model)` before torch.compile; it keeps parameters, process groups and options"
)
_REPLICATE = (
    "replace DistributedDataParallel(model) by overlapc.fully_shard(model, mesh) on a mesh of shape (ranks, 1) with"
    " mesh_dim_names=('replicate', 'shard'): it replicates parameters, and reduces gradients in the graph"
)

watch_optimizers()  # before Dynamo traces an optimizer: the code that it traces must not change later


def overlapc(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | Config | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph that Dynamo captured: the function that `torch.compile(backend="overlapc", options=…)` calls.

    mode: torch's name for a set of options (`config.MODES`).

    Raises ConfigError for invalid options, CompileError with the FX node and the user's source line for a graph that
    cannot be compiled, RanksDisagree when ranks compile different graphs.
    """
    with _errors_for_dynamo():
        config = Config.of(options, mode)
        _check_communication(gm)
        restore_addcdiv(gm)
        separate_results(gm)
        if only_reduces(gm):
            return copy_all_results(copied_capture(gm))
        copy_results_that_reduce(gm)
        number = next_number()
        CAPTURES.note(number)
        devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
        untraceable = untraceable_changes.why_eagerly(gm)
        if untraceable is not None:
            return always_eagerly(copied_capture(gm), *untraceable)
        late, within = not_waited_for(example_inputs), tensors_of_tensors(example_inputs)
        places = InputPlaces(gm, example_inputs)
        reason = places.why_eagerly()
        if reason is not None:
            return always_eagerly(copied_capture(gm), reason)
        constant = places.constant()
        eager = copied_capture(gm) if constant else None  # tracing rewrites the graph of `gm`
        as_given = None if constant or late or within else (options, mode)
        examples = plain_examples(example_inputs, late)
        try:
            with arrived(examples, within):
                step = _step(gm, examples, config, number, devices, as_given)
        except (AssertionError, RuntimeError) as error:
            reason = why_untraceable(error)
            if eager is None or reason is None:
                raise
            return always_eagerly(eager, reason)
        if late or within:
            step = waits_first(step, late, within)
        return step if eager is None else eagerly_elsewhere(step, eager, constant)


def _step(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    number: int,
    devices: Collection[str],
    as_given: tuple[Mapping[str, Any] | Config | None, str | None] | None = None,
) -> Callable[..., Any]:
    """Load the step from the disk cache, or compile it.

    as_given: options and mode as the user gave them, if a trace that torch caches may call this step directly.
    """
    key = _step_key(gm, example_inputs, config, devices)
    agree = None if compiled_autograd(gm) else _agreement(gm, example_inputs, config)
    if key is not None and as_given is not None and torch._dynamo.config.caching_precompile:
        from overlapc.warm import precompile

        environment = environment_of(config, devices)
        precompile.record(gm, precompile.CachedStepKey(key, environment, *as_given, tuple(sorted(devices))))
    cached = load_step(key, config, number, agree)
    if cached is not None:
        return cached
    _build_ahead(config, devices)
    from overlapc.compilation import stages

    return stages.compile_step(gm, example_inputs, config, number, key, agree)


def _build_ahead(config: Config, devices: Collection[str]) -> None:
    """Start compile workers, and build what is built once per machine, while this process imports and traces.

    The process does not end before the thread does, so that no build is left unfinished in the cache.
    """
    from overlapc.estimators.simulator.native import library_in
    from overlapc.runtime.copies.command_queues import unsupported

    communicates = dist.is_initialized() and dist.get_world_size() > 1

    def run() -> None:
        if "cuda" in devices:
            triton_workers.start()
        with suppress(ConfigError):  # raised again where the libraries are used
            library_in(config.cache_dir)
            host_launcher_type(config.cache_dir)
            if communicates and "cuda" in devices and config.transport != "nccl":
                unsupported(torch.device("cuda"), config.cache_dir)  # builds what copies need

    threading.Thread(target=run, name="overlapc-build-ahead").start()


def plan_only(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | Config | None = None
) -> Callable[..., Any]:
    """Plan and record a graph on fake tensors, without generating kernels: the backend of `overlapc plan`."""
    with _errors_for_dynamo():
        from overlapc.compilation.plan_only import plan_step

        _check_communication(gm)
        number = next_number()
        CAPTURES.note(number)
        return plan_step(gm, example_inputs, Config.of(options), number)


def schedule_only(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    on_schedule: Callable[[Schedule, Context], None],
    options: Mapping[str, Any] | Config | None = None,
) -> Callable[..., Any]:
    """Call `on_schedule` with the schedule of each graph and the passes' context, without running any pass."""
    with _errors_for_dynamo():
        from overlapc.compilation.plan_only import schedule_step

        return schedule_step(gm, example_inputs, Config.of(options), next_number(), on_schedule)


advised: set[str] = set()  # Python forgets what it has warned of whenever torch changes its filters


def _advise(text: str) -> None:
    """Warn once about how the program is written, on rank 0 only, because all ranks run the same program."""
    if text not in advised and (not dist.is_initialized() or dist.get_rank() == 0):
        advised.add(text)
        warnings.warn(text, stacklevel=3)


def _check_communication(gm: GraphModule) -> None:
    """Warn about communication that is outside the graph, or that no compute in the graph can hide."""
    if runs_under_fsdp2():
        _advise_against_hooks("is sharded by FSDP2's fully_shard", "gathers and reductions", _ADOPT)
    elif runs_under_ddp():
        _advise_against_hooks("is wrapped in DistributedDataParallel", "reductions", _REPLICATE)
    if "overlapc.parallel.gather" in sys.modules:  # otherwise overlapc has sharded no model
        _check_gathers(gm)


def _advise_against_hooks(how: str, communication: str, hint: str) -> None:
    _advise(
        f"this model {how}: its {communication} run in hooks that Dynamo does not trace, so they stay outside the"
        f" compiled graph, and overlapc cannot overlap them with compute.\nhint: {hint}"
    )


def _check_gathers(gm: GraphModule) -> None:
    from overlapc.parallel.separate_blocks import compiled_alone
    from overlapc.parallel.writes import refuse_writes

    refuse_writes(gm.graph)
    if compiled_alone(gm.graph):
        _advise(
            "overlapc compiles a module of a sharded model by itself: communication is scheduled within one compiled"
            " graph, so no compute hides this module's gathers and reductions.\nhint: compile the outermost module,"
            " torch.compile(model); if you already do, there is a graph break in the model: TORCH_LOGS=graph_breaks"
            " shows where"
        )


def _step_key(gm: GraphModule, inputs: Sequence[Any], config: Config, devices: Collection[str]) -> str | None:
    """Return the cache key of the whole step, or None if the step cannot be cached."""
    if not uses_disk_cache(config) or compiled_autograd(gm):
        return None
    gather = sys.modules.get("overlapc.parallel.gather")
    params = None if gather is None else gather.described_params
    try:
        return user_graph_key(gm, inputs, "step", *environment_of(config, devices), params=params)
    except NotCacheable as reason:
        count(f"step not cached: {reason}")
        return None


def _agreement(gm: GraphModule, inputs: Sequence[Any], config: Config) -> Agree | None:
    """Return a function that asks whether all ranks have cached this step, or None if no other rank compiles it.

    If the step communicates, ranks that have no cached step must call the function, too: every rank has its own cache.
    It asks once: a rank whose cached step was refused compiles, and then calls it again.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from overlapc.planning.agreed import common_step, groups_of_step
    from overlapc.planning.rank_notes import notes_of

    groups = groups_of_step(inputs, config)
    pairs = zip(inputs, gm.graph.find_nodes(op="placeholder"), strict=False)
    batches = [(value, node) for value, node in pairs if type(value) is torch.Tensor and _is_batch(node)]
    batches.sort(key=lambda pair: pair[1].name)  # Dynamo's order of inputs depends on which sizes are symbolic
    gathered = _gathered(gm)  # now, because tracing rewrites the graph
    asked = False

    def agree(kind: str, cached: Sequence[CompiledGraph]) -> Sequence[Mapping[str, GraphCopies]] | None:
        nonlocal asked
        if asked:
            return None
        asked = True
        return common_step(groups, kind, gathered, cached, config, notes_of(gm, config), batches)

    return agree if groups else None


def _gathered(gm: GraphModule) -> frozenset[tuple[str, bool]]:
    """Return the sharded parameters that Dynamo's graph gathers, and whether gradients stay unreduced. A graph in which
    these are other ones than in all earlier graphs of a function is compiled by all ranks."""
    gather = sys.modules.get("overlapc.parallel.gather")
    if gather is None:  # overlapc has sharded no model
        return frozenset()
    from overlapc.fx.subgraphs import nodes_within

    nodes = (node for outer in gm.graph.nodes for node in (outer, *nodes_within(outer)))
    calls = (node for node in nodes if node.target is gather.unshard)
    return frozenset((gather.param_of(str(call.args[1])).label.param, any(call.args[2:])) for call in calls)


def _is_batch(node: Node) -> bool:
    """Whether an input of Dynamo's graph is neither a parameter nor a buffer, of which ranks may have uneven parts."""
    of_module = "_dynamo_static_input_type" in node.meta.get("tensor_dict", ())
    return type(node.meta.get("example_value")) is FakeTensor and not of_module


@contextmanager
def _errors_for_dynamo() -> Iterator[None]:
    """Let Dynamo pass our errors to the user, and break the graph where torch cannot trace an operator."""
    try:
        yield
    except OverlapcError as error:
        raise _for_dynamo(error) from error.__cause__
    except untraceable_ops.UNTRACEABLE as error:
        if not compile_id():  # the backend is called without Dynamo, which alone can break a graph
            raise
        made = untraceable_ops.graph_break(error, _advise)
        raise (_for_dynamo(made) if isinstance(made, OverlapcError) else made) from error


def _for_dynamo(error: OverlapcError) -> OverlapcError:
    """Return `error` as a subclass of its own class that Dynamo passes to the user unchanged."""
    kind, text = type(error), str(error)
    if isinstance(error, ShortenTraceback):
        return error
    # Dynamo appends hints about itself to `args`; our message is complete, so `__str__` ignores them. The signature of
    # the error class's `__init__` is not known here, so it is bypassed and the error's attributes are copied.
    fixed = {
        "__module__": kind.__module__,
        "__init__": lambda self: ShortenTraceback.__init__(self, text, first_useful_frame=None),
        "__str__": lambda self: text,
    }
    made: OverlapcError = type(kind.__name__, (kind, ShortenTraceback), fixed)()
    made.__dict__.update(vars(error))
    return made
