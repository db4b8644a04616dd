"""Traces a graph that Dynamo captured with AOTAutograd, and compiles the forward and backward that result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch._dynamo import disable
from torch._dynamo.utils import flatten_graph_inputs
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overlapc.compilation.folded_blocks import Folded
from overlapc.config import Config
from overlapc.errors import CompileError
from overlapc.fx.captured.aliased_outputs import views_outside
from overlapc.fx.decompositions import decompositions
from overlapc.fx.equal_layers.blocks import Unfit
from overlapc.fx.masks.attention_masks import drop_masks
from overlapc.fx.partitioning.partition import partition
from overlapc.fx.supported_torch import check_torch_version
from overlapc.fx.versions.changes import (
    checkpoints_without_backward,
    contiguous_tangents,
    may_overlap,
    no_code_of_graphs,
    pads_on_every_rank,
    sizes_from_inputs,
)
from overlapc.fx.versions.dynamo import compiled_autograd
from overlapc.fx.versions.graphs import lacks_results
from overlapc.gc_paused import gc_paused
from overlapc.graph_names import BACKWARD, FORWARD, INFERENCE, graph_name
from overlapc.passes.runner import select
from overlapc.planning.agreed import compiles_with_others
from overlapc.runtime.counters import count
from overlapc.runtime.deterministic import deterministic
from overlapc.runtime.phases import phase
from overlapc.stack_room import with_stack_room

GraphCompiler = Callable[..., Callable[..., Any]]  # called with (gm, inputs, *, config, name)
Partition = Callable[..., tuple[GraphModule, GraphModule]]  # AOTAutograd's `partition_fn`: splits a joint graph


def step_of(
    compile_graph: GraphCompiler,
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    number: int,
    divide: Partition = partition,
) -> Callable[..., Any]:
    """Return a callable that runs forward and backward of `gm`, compiled by `compile_graph`.

    divide: partitions the joint graph into forward and backward. Raises ConfigError for unknown passes.
    """
    check_torch_version()
    select(config.passes)  # fail early for an unknown pass, not only after the first graph has been lowered
    if any(isinstance(value, list | tuple | dict) for value in example_inputs):  # compiled autograd's graphs
        flat = partial(_traced, compile_graph, config=config, number=number, divide=divide)
        return flatten_graph_inputs(gm, example_inputs, flat)
    return _traced(compile_graph, gm, example_inputs, config=config, number=number, divide=divide)


def _traced(
    compile_graph: GraphCompiler,
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    config: Config,
    number: int,
    divide: Partition,
) -> Callable[..., Any]:
    """Trace and compile `gm` with AOTAutograd.

    AOTAutograd is called directly and not through `torch._dynamo.backends.common.aot_autograd`, which imports
    Inductor's scheduler and IR to ask whether they log: a tenth of a cold start on a machine that caches no bytecode.
    """
    if isinstance(gm, GraphModule):  # compiled autograd wraps its graph, which contains no whole attention calls
        drop_masks(gm, eager_dropout=config.fallback_random)
    as_they_were = views_outside(gm) if any(map(is_traceable_wrapper_subclass, inputs)) else None
    trace: Callable[..., Any] = partial(
        aot_module_simplified,
        decompositions=decompositions(native_random=not config.fallback_random),
        keep_inference_input_mutations=True,
    )
    compilers: dict[str, Any] = {
        "fw_compiler": partial(compile_graph, config=config, name=graph_name(FORWARD, number)),
        "bw_compiler": _hidden(partial(compile_graph, config=config, name=graph_name(BACKWARD, number))),
        "inference_compiler": partial(compile_graph, config=config, name=graph_name(INFERENCE, number)),
    }
    divide = _checked(phase("partition")(divide))

    def traced() -> Callable[..., Any]:
        trace_once = config.trace_once and not compiled_autograd(gm)
        step = _folded(trace, gm, inputs, compilers, divide) if trace_once else None
        return trace(gm, inputs, partition_fn=divide, **compilers) if step is None else step

    # Ranks whose sizes are fixed would compile backward when it first runs, and ranks whose sizes are symbolic with
    # forward: those would wait for each other, one in a meeting and the other in a collective of forward.
    with_forward = compiles_with_others(config) and not compiled_autograd(gm)
    # The garbage collector is paused: tracing creates many objects, and all of them stay alive.
    with (
        phase("AOTAutograd"),
        deterministic(config.deterministic),
        gc_paused(),
        checkpoints_without_backward(),
        contiguous_tangents(may_overlap),
        no_code_of_graphs(),
        sizes_from_inputs(),
        pads_on_every_rank(),
        functorch_config.patch(force_non_lazy_backward_lowering=with_forward),
    ):
        try:
            step = traced()
        except _SizeFixed:
            step = traced()  # the size is constant from the start now
    call = step if as_they_were is None else lambda *given: as_they_were(step(*given))
    return disable(call, reason="it is compiled")


class _SizeFixed(CompileError):
    """Tracing backward found a size constant that AOTAutograd counts among the results of forward."""

    def __init__(self) -> None:
        super().__init__(
            "backward fixes a size of a DTensor that forward returns, which torch traced as one that varies\n"
            "hint: torch.compile(..., dynamic=False) compiles once more for other sizes"
        )


def _checked(divide: Partition) -> Partition:
    """Return `divide` with a check before it; it raises _SizeFixed."""

    def checked(joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        if lacks_results(joint.graph, num_fwd_outputs):
            raise _SizeFixed()
        return divide(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)

    return checked


def _folded(
    trace: Callable[..., Any],
    gm: GraphModule,
    inputs: Sequence[Any],
    compilers: Mapping[str, Any],
    divide: Partition,
) -> Callable[..., Any] | None:
    """Trace and compile `gm` with equal blocks traced only once; None if that is not possible."""
    try:
        with phase("equal blocks"):
            folded = Folded(gm, inputs, trace)
    except Unfit as reason:
        count(f"blocks traced one by one: {reason}")
        return None

    def partition_unfolded(joint: GraphModule, joint_inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        with phase("equal blocks"):
            folded.unfold(joint)
        return divide(joint, joint_inputs, **options)

    def infer(graph: GraphModule, *args: Any) -> Any:
        with phase("equal blocks"):
            folded.unfold(graph)
        return compilers["inference_compiler"](graph, *args)

    try:
        return trace(
            folded.module, inputs, partition_fn=partition_unfolded, **{**compilers, "inference_compiler": infer}
        )
    except Unfit as reason:
        count(f"blocks traced one by one: {reason}")
        return None
    finally:
        folded.close()


def _hidden(compiler: GraphCompiler) -> GraphCompiler:
    """Return `compiler` with Dynamo disabled for it and for what it returns: Dynamo may be tracing while backward is
    compiled and run."""

    @with_stack_room
    def compile_backward(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return disable(disable(compiler)(*args, **kwargs), reason="it is compiled")

    return compile_backward
