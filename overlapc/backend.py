"""The `torch.compile` backend. A step that an earlier process compiled is found here; all else is the work of
`compilation/`.

What a warm start does not need is not imported: the compiler is ten times as large as what runs its results.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._dynamo.exc import ShortenTraceback
from torch.fx import GraphModule

from overlapc.config import Config
from overlapc.errors import OverlapcError
from overlapc.fx.versions import compiled_autograd, copied_capture, runs_under_ddp, runs_under_fsdp2
from overlapc.report.captures import CAPTURES
from overlapc.runtime.async_inputs import arrived, not_waited_for, plain_examples, tensors_of_tensors, waits_first
from overlapc.runtime.counters import count
from overlapc.runtime.input_offsets import InputPlaces, always_eagerly, eagerly_elsewhere
from overlapc.runtime.steps import watch_optimizers
from overlapc.runtime.triton_launch import get_ready
from overlapc.warm.fingerprint import NotCacheable, user_graph_key
from overlapc.warm.loading import Agree, environment_of, load_step, next_number, uses_disk_cache

if TYPE_CHECKING:  # parts of the compiler
    from overlapc.passes.base import Context
    from overlapc.schedule.model import Schedule

_ADOPT = "model = overlapc.adopt_fsdp2(model) before torch.compile takes the model over as it is"
_REPLICATE = (
    "in place of DistributedDataParallel(model), overlapc.fully_shard(model, mesh) on a mesh of (ranks, 1), with"
    " mesh_dim_names=('replicate', 'shard'), keeps all parameters on each rank and reduces gradients in the graph"
)

watch_optimizers()  # now: what Dynamo traces of an optimizer must not change later


def overlapc(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | Config | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What `torch.compile(backend="overlapc", options=…)` calls for every graph that Dynamo captures.

    mode: torch's name for a set of options (`config.MODES`).

    Raises ConfigError for options it cannot use, CompileError with the FX node and the user's line for a graph it
    cannot compile, RanksDisagree when ranks compile different graphs.
    """
    try:
        config = Config.of(options, mode)
        _look_at_communication(gm)
        number = next_number()
        CAPTURES.note(number)
        devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
        late, within = not_waited_for(example_inputs), tensors_of_tensors(example_inputs)
        if not late and not within:
            places = InputPlaces(gm, example_inputs)
            reason = places.why_eagerly()
            if reason is not None:
                return always_eagerly(copied_capture(gm), reason)
            offsets = places.offsets()
            if offsets:
                eager = copied_capture(gm)  # tracing rewrites the graph of `gm`
                return eagerly_elsewhere(_step(gm, example_inputs, config, number, devices), eager, offsets)
            return _step(gm, example_inputs, config, number, devices, (options, mode))
        examples = plain_examples(example_inputs, late)
        with arrived(examples, within):
            step = _step(gm, examples, config, number, devices)
        return waits_first(step, late, within)
    except OverlapcError as error:
        raise _direct(error) from error.__cause__


def _step(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    number: int,
    devices: Collection[str],
    as_given: tuple[Mapping[str, Any] | Config | None, str | None] | None = None,
) -> Callable[..., Any]:
    """Loads the step from the disk cache, or compiles it.

    as_given: options and mode, for a step that a trace which torch caches may call directly.
    """
    key = _step_key(gm, example_inputs, config, devices)
    agree = None if compiled_autograd(gm) else _agreement(gm, example_inputs, config)
    if key is not None and as_given is not None and torch._dynamo.config.caching_precompile:
        from overlapc.warm import precompile

        environment = environment_of(config, devices)
        precompile.record(gm, precompile.CachedStepKey(key, environment, *as_given, tuple(sorted(devices))))
    kept = load_step(key, config, number, agree)
    if kept is not None:
        return kept
    if "cuda" in devices:
        get_ready(config.cache_dir)  # while this process imports the compiler and traces
    from overlapc.compilation import stages

    return stages.compile_step(gm, example_inputs, config, number, key)


def plan_only(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | Config | None = None
) -> Callable[..., Any]:
    """A backend that plans and records a graph on fake tensors, for `overlapc plan`; no kernel is generated."""
    try:
        from overlapc.compilation.plan_only import plan_step

        _look_at_communication(gm)
        number = next_number()
        CAPTURES.note(number)
        return plan_step(gm, example_inputs, Config.of(options), number)
    except OverlapcError as error:
        raise _direct(error) from error.__cause__


def schedule_only(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    found: Callable[[Schedule, Context], None],
    options: Mapping[str, Any] | Config | None = None,
) -> Callable[..., Any]:
    """A backend that goes as far as where passes begin, and hands `found` what they would be given for each graph."""
    try:
        from overlapc.compilation.plan_only import schedule_step

        return schedule_step(gm, example_inputs, Config.of(options), next_number(), found)
    except OverlapcError as error:
        raise _direct(error) from error.__cause__


def _advise(text: str) -> None:
    """Warns of how a program is written, which all ranks run: one of them says it."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(text, stacklevel=3)


def _look_at_communication(gm: GraphModule) -> None:
    """Warns of communication that is not in the graph, or has nothing in it to hide behind."""
    if runs_under_fsdp2():
        _advise_against_hooks("FSDP2's fully_shard, whose gathers and reductions run in hooks", _ADOPT)
    elif runs_under_ddp():
        _advise_against_hooks("DistributedDataParallel, whose reductions run in hooks of autograd", _REPLICATE)
    if "overlapc.parallel.gather" in sys.modules:  # else there is nothing that we shard
        _look_at_gathers(gm)


def _advise_against_hooks(whose: str, hint: str) -> None:
    _advise(
        f"overlapc compiles a module in the forward of {whose} that Dynamo does not trace: they stay outside of the"
        f" graph, and nothing can be scheduled around them.\nhint: {hint}"
    )


def _look_at_gathers(gm: GraphModule) -> None:
    from overlapc.parallel.separate_blocks import compiled_alone
    from overlapc.parallel.writes import refuse_writes

    refuse_writes(gm.graph)
    if compiled_alone(gm.graph):
        _advise(
            "overlapc compiles a module of a sharded model by itself: communication is scheduled within one compiled"
            " graph, so nothing hides what this one gathers and reduces. Each such module is compiled again, and after"
            f" torch._dynamo.config.recompile_limit ({torch._dynamo.config.recompile_limit}) of them Dynamo runs the"
            " others eagerly.\nhint: compile the outermost module, torch.compile(model); if you do, a graph break comes"
            " in between, which TORCH_LOGS=graph_breaks shows"
        )


def _step_key(gm: GraphModule, inputs: Sequence[Any], config: Config, devices: Collection[str]) -> str | None:
    """Under which the whole step is kept; None when it must be compiled each time."""
    if not uses_disk_cache(config) or compiled_autograd(gm):
        return None
    gather = sys.modules.get("overlapc.parallel.gather")
    params = None if gather is None else gather.described_params
    try:
        return user_graph_key(gm, inputs, "step", *environment_of(config, devices), params=params)
    except NotCacheable as reason:
        count(f"step not kept: {reason}")
        return None


def _agreement(gm: GraphModule, inputs: Sequence[Any], config: Config) -> Agree | None:
    """Makes the function that asks whether all ranks have cached this step; None where no other rank compiles it.

    Ranks that have no cached step must ask, too: every rank has its own cache.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from overlapc.planning.agreed import common_step, ranks_of_step
    from overlapc.planning.rank_notes import notes_of

    peers = ranks_of_step(inputs, config)
    return None if peers is None else lambda kept: common_step(peers, kept, config, notes_of(gm, config))


def _direct(error: OverlapcError) -> OverlapcError:
    """`error` in a class that Dynamo hands to the user as it is, and that is still caught by its own name."""
    kind, text = type(error), str(error)
    if isinstance(error, ShortenTraceback):
        return error
    # Dynamo appends hints about itself to `args`; our message says all there is to say. What else the error's own
    # class takes to make one is not known here: its attributes are carried over.
    fixed = {
        "__module__": kind.__module__,
        "__init__": lambda self: ShortenTraceback.__init__(self, text, first_useful_frame=None),
        "__str__": lambda self: text,
    }
    made: OverlapcError = type(kind.__name__, (kind, ShortenTraceback), fixed)()
    made.__dict__.update(vars(error))
    return made
