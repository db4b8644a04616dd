"""All differences between torch 2.11, 2.12 and 2.13, and all private names of torch that overlapc uses.

Dynamo's tracing is the exception: only `parallel/replayed_blocks.py` uses its names.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial, wraps
from typing import Any

import torch
from torch import fx, nn
from torch._decomp import _core_aten_decompositions_post_autograd
from torch._functorch._aot_autograd.descriptors import (
    DifferentiableAOTInput,
    InputMutationAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch._library.fake_class_registry import FakeScriptObject
from torch._library.opaque_object import is_opaque_value
from torch._logging._internal import log_state, trace_log
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

# Names without a public spelling in any supported version; imported here only, so that a move is one edit.
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx import traceback
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from overlapc.fx.graph_copy import copied

StridedShard = _StridedShard


def skip_calls_of(functions: Iterable[Callable[..., Any]]) -> None:
    """Make Dynamo skip calls of functions that log messages.

    torch 2.11 fails to write its configuration to its log if that names functions, and prints the error at each
    compilation; it then writes it without them.
    """
    from torch._dynamo import config, utils  # here, because importing Dynamo takes a second

    config.ignore_logging_functions.update(functions)
    written = utils._get_dynamo_config_for_logging
    try:
        written()
    except TypeError:

        def without_functions() -> str | None:
            with config.patch(ignore_logging_functions=set()):
                return written()

        utils._get_dynamo_config_for_logging = without_functions


def sized_by_data(op: torch._ops.OpOverload) -> bool:
    """Whether the sizes of the op's results depend on data; torch 2.11 lacks the tag on `_unique`."""
    return torch.Tag.dynamic_output_shape in op.tags or op is torch.ops.aten._unique.default


def set_autograd_rule(op: torch._ops.OpOverload, rule: Callable[..., Any]) -> None:
    """Replace torch's Python rule for `op` under autograd by `rule`, so that traces differentiate `rule`."""
    op.py_kernels[torch._C.DispatchKey.Autograd] = rule
    op._dispatch_cache.clear()


def joined_mesh(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh | None:
    """Return the mesh with the axes of `first` and then of `second`, as FSDP2 makes it.

    None if the two are not distinct axes of one mesh. Axes of unflattened meshes have no common root that knows their
    names.
    """
    if not (first.mesh_dim_names and second.mesh_dim_names):
        return None
    try:
        with unset_fake_temporarily():  # a model may be planned on fake tensors, but ranks are counted on real ones
            return DeviceMesh._concatenate([first, second])
    except RuntimeError:  # other ranks, or overlapping ones
        return None


def in_backward() -> bool:
    """Whether the autograd engine runs on this thread, for example when an eager checkpoint repeats its forward."""
    return torch._C._current_graph_task_id() != -1


def fsdp2_state(module: nn.Module) -> Any:
    """Return FSDP2's state of a module that was passed to its `fully_shard`, else None."""
    return _get_module_state(module) if isinstance(module, FSDPModule) else None


def fsdp2_groups(state: Any) -> list[Any]:
    """Return the parameter groups of one `fully_shard` call; torch 2.11 has one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def fsdp2_original(param: Any) -> int | None:
    """Return the number of the parameter that FSDP2 sharded, equal for tied ones; None with torch 2.11."""
    found: int | None = getattr(param, "_orig_param_uid", None)
    return found


def release_fsdp2(state: Any) -> None:
    """Undo what FSDP2's `fully_shard` did to its modules, except for their parameters, which stay sharded."""
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in fsdp2_groups(state):
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [param._post_load_hook_handle for param in group.fsdp_params]
    for handle in handles:
        handle.remove()
    for module in state._modules:
        del _module_state_mapping[module]
        module.__class__ = next(cls for cls in type(module).__mro__[1:] if not issubclass(cls, FSDPModule))
        for inner in module.modules():
            for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
                inner.__dict__.pop(mark, None)


def set_fsdp2_state(module: nn.Module, state: Any) -> None:
    """Make `torch.distributed.fsdp.fully_shard.state(module)` return `state`, for torch code that calls it."""
    states = module.__dict__.setdefault(STATE_KEY, {})
    states[fully_shard.__wrapped__] = state  # type: ignore[attr-defined]


def runs_under_fsdp2() -> bool:
    """Whether a module that FSDP2 manages is running its forward."""
    states = {id(state): state for ref in _module_state_mapping.values() if (state := ref()) is not None}
    return any(getattr(getattr(state, "_training_state", None), "name", "") == "FORWARD" for state in states.values())


def runs_under_ddp() -> bool:
    """Whether a DistributedDataParallel module is running its forward."""
    return DistributedDataParallel._get_active_ddp_module() is not None


def compiled_autograd(gm: Any) -> bool:
    """Whether compiled autograd traced `gm`, or will trace its backward: it supports only AOTAutograd's own functions.

    A backward that it traced takes its inputs in lists, and is passed in a wrapper that is not a GraphModule.
    """
    from torch._dynamo import compiled_autograd as autograd
    from torch._dynamo import config

    return not isinstance(gm, fx.GraphModule) or config.compiled_autograd or autograd.compiled_autograd_enabled


def is_object(node: fx.Node) -> bool:
    """Whether the value of a node is an object that graphs only pass on, such as a DeviceMesh."""
    value = _traced_value(node)
    return isinstance(value, torch.ScriptObject | FakeScriptObject) or is_opaque_value(value)


def value_of_object(node: fx.Node) -> Any:
    """Return the object that `node`, which is one, stands for."""
    value = _traced_value(node)
    return getattr(value, "real_obj", value)


def _traced_value(node: fx.Node) -> Any:
    """Return the value that AOTAutograd, or else Dynamo, noted at a node."""
    return node.meta.get("val", node.meta.get("example_value"))


def return_no_tangents(joint: fx.Graph, forward_outputs: int) -> None:
    """Let forward return the mesh of a DTensor as one of its inputs, if torch 2.13 traced it as a tangent's mesh.

    torch finds the input that holds a mesh by the mesh's identity. If the program created an equal mesh earlier,
    DTensors that the graph creates may have that mesh, and only the tangents, which were made up for tracing, share it.
    """
    output = joint.output_node()
    (returned,) = output.args
    assert isinstance(returned, Sequence)
    placeholders = joint.find_nodes(op="placeholder")
    given = {_real(node): node for node in reversed(placeholders) if _is_mesh(node) and "tangents" not in node.name}
    changed = [
        given.get(_real(node), node)
        if at < forward_outputs and isinstance(node, fx.Node) and "tangents" in node.name and _is_mesh(node)
        else node
        for at, node in enumerate(returned)
    ]
    if changed != list(returned):
        output.args = (changed,)


def _is_mesh(node: fx.Node) -> bool:
    return isinstance(_real(node), DeviceMesh)


def _real(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "real_obj", None)


def belongs_to_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd tagged a node of a joint graph as backward's, for example a mutation made in backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def inputs_written_after(joint: fx.Graph) -> set[fx.Node]:
    """Return the inputs of a joint graph into which AOTAutograd's wrapper copies results after forward has run."""
    results = map(_outermost, joint.output_node().meta["desc"])
    written = {result.mutated_input for result in results if isinstance(result, InputMutationAOTOutput)}
    return {node for node in joint.find_nodes(op="placeholder") if _outermost(node.meta.get("desc")) in written}


def inputs_changed_unseen(joint: fx.Graph) -> set[fx.Node]:
    """Return the inputs of a joint graph that are changed without autograd's knowledge, as through `x.data`."""
    infos = getattr(getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None), "input_info", ())
    nodes: dict[Any, list[fx.Node]] = {}
    for node in joint.find_nodes(op="placeholder"):
        description = _outermost(node.meta.get("desc"))
        if isinstance(description, DifferentiableAOTInput) and not isinstance(description, TangentAOTInput):
            nodes.setdefault(description, []).append(node)
    if len(nodes) != len(infos):
        return set()
    found = zip(nodes.values(), infos, strict=True)
    return {node for parts, info in found if info.mutations_hidden_from_autograd for node in parts}


def _outermost(description: Any) -> Any:
    """Return the description of the outermost tensor, if `description` is of an attribute of a tensor subclass."""
    while isinstance(description, SubclassGetAttrAOTInput | SubclassGetAttrAOTOutput):
        description = description.base
    return description


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return `module` as a function of one list of arguments, which it empties: each is freed after its last use.

    In a version of torch without boxed code generation, the arguments live until the function returns.
    """
    codegen = getattr(fx.graph, "_BoxedCodeGen", None)
    if codegen is None:

        def call(args: list[Any]) -> Any:
            given = tuple(args)
            args.clear()
            return module(*given)

        return call
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(codegen())
    return fx.GraphModule(module, graph, class_name=type(module).__name__).forward


def group_name_of(group: Any) -> str | None:
    """Return the name of a collective's process group from the argument in the graph; None if there is none.

    The argument is a string in torch 2.11; in 2.13 it may be a ProcessGroup, or a node that reads one from a mesh
    input.
    """
    if isinstance(group, fx.Node):
        group = group.meta.get("val")
    group = getattr(group, "real_obj", group)  # FakeScriptObject
    if group is None or isinstance(group, str):
        return group
    return group.group_name


def resolve_group(name: str) -> Any:
    """Return this process's process group with that name."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]


def donated_inputs() -> list[int] | None:
    """Return the positions of inputs that only the backward graph being compiled refers to; None if unknown.

    A saved tensor that is a view of a parameter, for instance, is not among them.
    """
    found: Any = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    donated: list[int] | None = getattr(found, "bw_donated_idxs", None)
    return donated


@dataclass(frozen=True, slots=True)
class GradientMetadata:
    """Where an input's gradient is among the results of the backward graph."""

    at: int  # index of the gradient, or of a DTensor's local part
    mesh_at: int | None = None  # index of a DTensor's mesh in torch 2.13; in earlier versions, `make` knows the mesh
    make: Callable[[Sequence[Any]], torch.Tensor] | None = None  # makes the DTensor from all results; None if plain
    as_input: bool = True  # the gradient has the placements and sizes of the input


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """The part of AOTAutograd's metadata of a step that a caller of its graphs needs."""

    inputs: tuple[tuple[str, ...], ...]  # for each input, its attributes that the graphs take; () for the input itself
    differentiable: tuple[bool, ...]  # by output
    gradients: tuple[GradientMetadata, ...]  # by input
    changed: tuple[int, ...]  # inputs that a graph changes in place so that autograd must be told
    computed: tuple[int, ...]  # inputs that require gradients and are no leaves
    sizes: int  # number of symbolic sizes that forward saves, after all other saved values
    objects: int  # number of meshes that forward saves, before the sizes
    formats: tuple[torch.memory_format | None, ...]  # of tangents of symbolic size; None for those of static size
    dynamic: tuple[tuple[int, tuple[int, ...]], ...]  # (output, its dims that a later graph should take as symbolic)
    deterministic: bool  # backward may run under torch.use_deterministic_algorithms


def step_metadata() -> StepMetadata | None:
    """Return the metadata of the step of plain tensors that AOTAutograd is compiling on this thread.

    None if an output aliases another tensor, a tensor is a subclass that holds others, an input is changed in a way
    that the graph alone cannot do (other sizes, other memory, differentiable changes), or graphs take or return more
    than the user's tensors (tokens, random state): only torch's own wrapper can then call the graphs.
    """
    context = torch._guards.TracingContext.try_get()
    found: Any = getattr(context, "fw_metadata", None)
    if found is None or any(map(_attributes, found.subclass_inp_meta)):
        return None
    return _metadata(found, tuple(map(GradientMetadata, range(len(found.input_info)))))


def dtensor_step_metadata(outputs: Iterable[Any]) -> StepMetadata | None:
    """Return the metadata of a step with DTensors from its `outputs`, which AOTAutograd's wrapper has just returned.

    Only that wrapper has the DTensors it traced. None in the same cases as `step_metadata`, or if an output is not a
    plain tensor, or an input or gradient is neither a plain tensor nor a DTensor of static size around a plain tensor.
    """
    nodes: Iterable[Any] = (each.grad_fn for each in outputs if isinstance(each, torch.Tensor))
    function: Any = next((node._forward_cls for node in nodes if hasattr(node, "_forward_cls")), None)
    inside = getattr(function, "maybe_subclass_metadata", None)
    if inside is None or not all(map(_is_supported, (*function.metadata.subclass_inp_meta, *inside.grad_input_metas))):
        return None
    metas = zip(inside.grad_input_metas, function.metadata.subclass_inp_meta, strict=True)
    return _metadata(function.metadata, tuple(_gradient(*each) for each in metas))


def _attributes(meta: Any) -> tuple[str, ...]:
    """Return the names of the attributes of a tensor subclass from AOTAutograd's metadata; () for a plain tensor."""
    return tuple(getattr(meta, "attrs", ()))


def _is_supported(meta: Any) -> bool:
    """Whether AOTAutograd's metadata `meta` is of a plain tensor, or a DTensor of static size around a plain one."""
    if not _attributes(meta):
        return True
    return (
        (meta.original_subclass_type or type(meta.original_subclass)) is DTensor
        and _attributes(meta) in (("_local_tensor",), ("_local_tensor", "device_mesh"))
        and not any(map(_attributes, meta.attrs.values()))
        and all(isinstance(each, int) for each in (*meta.outer_size, *meta.outer_stride))
    )


def _gradient(meta: Any, of: Any) -> GradientMetadata:
    """Return the metadata of a gradient from AOTAutograd's, `meta`. of: AOTAutograd's metadata of the input."""
    attributes = _attributes(meta)
    if not attributes:
        return GradientMetadata(meta.unwrapped_idx, as_input=not _attributes(of))
    at = meta.flat_tensor_start_idx
    mesh_at = at + 1 if "device_mesh" in attributes else None
    as_input = _form(meta) == _form(of) if _attributes(of) == attributes else False
    return GradientMetadata(at, mesh_at, partial(meta.creation_fn, is_runtime=True), as_input)


def _form(meta: Any) -> tuple[Any, ...]:
    """Return a DTensor's placements, global sizes and strides (torch 2.11: and mesh) from AOTAutograd's metadata."""
    *spec, _requires_grad = meta.meta
    return (*spec, tuple(meta.outer_size), tuple(meta.outer_stride))


def _metadata(found: Any, gradients: tuple[GradientMetadata, ...]) -> StepMetadata | None:
    special = (
        found.num_intermediate_bases
        or found.tokens
        or found.num_backward_tokens
        or found.num_graphsafe_rng_states
        or found.is_rng_op_functionalized
        or getattr(found, "num_tensors_saved_with_no_vc_check", None)
        or getattr(found, "indices_of_inputs_that_requires_grad_with_mutations_in_bw", None)
        or found.grad_enabled_mutation is not None
    )
    changed_elsewhere = any(each.mutation_type.name == "MUTATED_OUT_GRAPH" for each in found.input_info)
    plain_outputs = all(
        each.output_type.name in ("non_alias", "unsafe_view_alias") and issubclass(each.raw_type, torch.Tensor)
        for each in found.output_info
    )
    holding = any(map(_attributes, (*found.subclass_fw_graph_out_meta, *found.subclass_tangent_meta)))
    if special or changed_elsewhere or not plain_outputs or holding:
        return None
    formats = [getattr(each, "memory_format", None) for each in found.subclass_tangent_meta]
    return StepMetadata(
        inputs=tuple(map(_attributes, found.subclass_inp_meta)) or ((),) * len(found.input_info),
        differentiable=tuple(each.requires_grad for each in found.output_info),
        gradients=gradients,
        changed=tuple(found.mutated_graph_handled_indices_seen_by_autograd),
        computed=tuple(at for at, each in enumerate(found.input_info) if each.requires_grad and not each.is_leaf),
        sizes=found.num_symints_saved_for_bw or 0,
        objects=getattr(found, "num_opaque_objects_saved_for_bw", None) or 0,
        formats=tuple(getattr(each, "memory_format", each) for each in formats),
        dynamic=tuple((at, tuple(each.dynamic_dims)) for at, each in enumerate(found.output_info) if each.dynamic_dims),
        deterministic=found.deterministic is not False,
    )


def mark_dynamic(tensor: torch.Tensor, dims: Iterable[int]) -> None:
    """Mark `dims` of a graph's result `tensor` as dynamic, so that the next graph treats them as symbolic at once."""
    from torch._functorch._aot_autograd import runtime_wrappers

    name = "mark_dynamo_propagated_dynamic_indices"  # before torch 2.13: maybe_mark_dynamic_helper
    mark = getattr(runtime_wrappers, name, None) or runtime_wrappers.maybe_mark_dynamic_helper  # type: ignore[attr-defined]
    mark(tensor, set(dims))


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch's rules for ops outside of its core set, without the ops that autograd decomposes before.

    `torch._decomp.core_aten_decompositions` has those, too, which takes it a tenth of a second.
    """
    return _core_aten_decompositions_post_autograd()


@lru_cache(None)
def float8_saturates() -> bool:
    """Whether casting an out-of-range value to float8_e4m3fn gives the largest number (torch 2.13) instead of NaN."""
    with _disable_current_modes():
        return not torch.tensor(1e3).to(torch.float8_e4m3fn).float().isnan().item()


@contextmanager
def checkpoints_without_backward() -> Iterator[None]:
    """Let AOTAutograd trace checkpoints that draw random numbers in a graph without backward.

    torch refuses them in every graph that it does not partition, although nothing is recomputed if none of its nodes is
    backward's: then a validation step under `no_grad` with dropout fails.
    """
    from torch._functorch._activation_checkpointing import remat_using_tags_for_fwd_loss_bwd_graph_pass

    module: Any = remat_using_tags_for_fwd_loss_bwd_graph_pass
    recompute = module.remat_using_tags_for_fwd_loss_bwd_graph

    def recompute_in_backward(gm: fx.GraphModule) -> fx.GraphModule:
        notes = [(node.meta, node.meta.get("custom") or {}) for node in gm.graph.nodes]
        backward = any(meta.get("autograd_backward") or custom.get("phase") == "backward" for meta, custom in notes)
        done: fx.GraphModule = recompute(gm) if backward else gm
        return done

    module.remat_using_tags_for_fwd_loss_bwd_graph = recompute_in_backward
    try:
        yield
    finally:
        module.remat_using_tags_for_fwd_loss_bwd_graph = recompute


def may_overlap(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements of a tensor may share memory: a stride is not larger than the extent of all smaller ones."""
    reached = 0
    for step, extent in sorted((step, extent) for step, extent in zip(stride, size, strict=True) if extent > 1):
        if step <= reached:
            return True
        reached += step * (extent - 1)
    return False


@contextmanager
def contiguous_tangents(where: Callable[[Sequence[int], Sequence[int]], bool]) -> Iterator[None]:
    """Make AOTAutograd trace with contiguous tangents for results whose size and strides `where` accepts.

    AOTAutograd assumes that a tangent has the strides of its result. If elements of the result share memory (`unfold`),
    it would copy a tangent whose elements differ into such a layout; torch 2.13 handles this where a stride is 0.
    """
    metadata: Any = MemoryFormatMeta
    guess = metadata.from_tensor

    def guess_of(result: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        guessed = guess(result, *args, **kwargs)
        if guessed is None or guessed.stride is None or not where(guessed.size, guessed.stride):
            return guessed
        return metadata(memory_format=torch.contiguous_format)

    metadata.from_tensor = staticmethod(guess_of)
    try:
        yield
    finally:
        metadata.from_tensor = staticmethod(guess)


@contextmanager
def sizes_from_inputs() -> Iterator[None]:
    """While AOTAutograd traces, a size that is also an input of the graph stays that input.

    DTensor computes sizes while nothing is traced, and torch looks up where such a size came from by its symbol. An
    operation whose result equals its argument, such as `max(size, 1)`, would replace the input there, and then be the
    origin of its own argument: an endless recursion.
    """
    register = proxy_tensor._sym_register

    def registered(tracer: Any, func: Any, args: Any, out: Any) -> None:
        symbol = out.node.expr if isinstance(out, torch.SymInt) else None
        known = tracer.sympy_expr_tracker.get(symbol)
        register(tracer, func, args, out)
        if known is not None:
            tracer.sympy_expr_tracker[symbol] = known

    proxy_tensor._sym_register = registered
    try:
        yield
    finally:
        proxy_tensor._sym_register = register


@contextmanager
def saving_always_costs() -> Iterator[None]:
    """Let torch's partitioner take every value for at least one byte.

    Else it would save a value without elements, which costs nothing, where it recomputes one with elements: ranks whose
    shard of a parameter has no rows would divide the step differently.
    """
    from torch._functorch import partitioners  # not at the top, as below

    module: Any = partitioners
    size_of = module._size_of
    module._size_of = lambda node: max(1, size_of(node))
    try:
        yield
    finally:
        module._size_of = size_of


@contextmanager
def no_code_of_graphs() -> Iterator[None]:
    """While AOTAutograd traces, most of its graphs become Python code only if they are called, and text only if torch
    logs them."""
    # Not at the top: they import all of Dynamo, which takes a second, and the launcher's reports import this module.
    from torch._functorch import partitioners
    from torch._functorch._aot_autograd import graph_compile

    stages: Any = graph_compile
    divide: Any = partitioners
    reorder = divide.reordering_to_mimic_autograd_engine
    log_joint, log_divided = stages._log_joint_graph, stages._log_fw_bw_graphs
    logs = (stages.aot_joint_log, stages.aot_graphs_log)
    if not trace_log.handlers and not any(log.isEnabledFor(logging.INFO) for log in logs):
        stages._log_joint_graph = lambda *_: None
        stages._log_fw_bw_graphs = lambda *_: (None, None)
    divide.reordering_to_mimic_autograd_engine = partial(_reordered, reorder)
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        stages._log_joint_graph, stages._log_fw_bw_graphs = log_joint, log_divided
        divide.reordering_to_mimic_autograd_engine = reorder


def _reordered(reorder: Callable[[fx.GraphModule], fx.GraphModule], gm: fx.GraphModule) -> fx.GraphModule:
    """Call torch's `reorder`, whose module would write its code now and again for every change and copy."""
    kind: Any = fx.GraphModule
    write_code, here = kind.recompile, threading.get_ident()
    kind.recompile = lambda self: None if threading.get_ident() == here else write_code(self)
    try:
        reordered = reorder(gm)  # without code: only its graph is used
    finally:
        kind.recompile = write_code
    return _LazyGraphModule.from_graphmodule(reordered)


def copied_capture(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph that Dynamo captured, with the attributes outside of `meta` that AOTAutograd reads.

    These are the sources of inputs, from which AOTAutograd recognizes parameters: the partitioner saves those at no
    cost.
    """
    graph = copied(gm.graph)
    for ours, theirs in zip(graph.find_nodes(op="placeholder"), gm.graph.find_nodes(op="placeholder"), strict=True):
        if hasattr(theirs, "_dynamo_source"):
            ours._dynamo_source = theirs._dynamo_source
    # A _LazyGraphModule generates Python code when it is first called. AOTAutograd does not call it, but interprets the
    # nodes of its graph, so for a graph that never runs eagerly no code is generated.
    capture = _LazyGraphModule(gm, graph)
    capture.meta = dict(gm.meta)
    for name in ("_param_name_to_source", "_backend_id"):
        if hasattr(gm, name):
            setattr(capture, name, getattr(gm, name))
    return capture


def initialize_gpus_once() -> None:
    """Let fake tensors initialize each GPU once per process.

    torch asks the driver for the number of GPUs and allocates a tensor for each fake tensor that it makes.
    """
    module: Any = fake_tensor
    if not hasattr(module.init_gpu_context, "cache_info"):
        module.init_gpu_context = cache(module.init_gpu_context)


def name_lines_only_in_logs() -> None:
    """Let Dynamo look for the function around a line only if it logs its trace.

    Without this, Dynamo tokenizes the whole source file of each function that it traces, to name that function in a log
    that is off by default (`TORCH_LOGS=trace_call`). Tokenizing torch/nn/functional.py takes 40 ms of CPU time.
    """
    from torch._dynamo import symbolic_convert  # here, because importing Dynamo takes a second

    dynamo: Any = symbolic_convert
    look_up = dynamo.get_funcname
    if hasattr(look_up, "__wrapped__"):
        return

    @wraps(look_up)
    def function_at(filename: str, line: int) -> str | None:
        logged = any(map(log_state.is_artifact_enabled, ("trace_call", "trace_source")))
        return look_up(filename, line) if logged else None

    dynamo.get_funcname = function_at


def fake_like(
    value: FakeTensor, base: torch.Tensor | None, shift: int, mode: FakeTensorMode | None = None
) -> FakeTensor:
    """Return a fake tensor of the form of `value` in new memory, or in that of `base` with its offset moved by `shift`.

    It is built from a meta tensor, as torch does it; through torch's dispatcher this takes ten times as long.
    mode: default: that of `value`.
    """
    memory = value.untyped_storage().nbytes() if base is None else base.untyped_storage()
    with _disable_current_modes():
        storage = torch.UntypedStorage(memory, device="meta") if isinstance(memory, int) else memory
        form = torch.empty(0, dtype=value.dtype, device="meta")
        form.set_(storage, value.storage_offset() + shift, value.shape, value.stride())
        return FakeTensor(mode or value.fake_mode, form, value.device)


def size_hint(size: int | torch.SymInt) -> int:
    """Return a size as an integer for planning: for a symbolic size, its hint.

    A size that depends on data has no hint; overlapc assumes 4096 for it, as torch's partitioner does.
    """
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 4096


def symbol_hint(size: torch.SymInt | torch.SymFloat, symbol: Any) -> int | None:
    """Return the value that `symbol` had when the graph of `size` was traced; None if it is known only at run time."""
    shape_env = size.node.shape_env
    if shape_env is None:
        return None
    known = getattr(shape_env, "backed_var_to_val", None)  # torch 2.13
    if known is None:
        known = shape_env.var_to_val
    value = known.get(symbol)
    return None if value is None else int(value)


# --- Dynamo's records of its compilations


@dataclass(frozen=True)
class Traced:
    """One compilation of one frame by Dynamo."""

    compile_id: str  # "0/1": frame 0, its second compilation
    function: str
    source: str  # file:line
    recompiled: str  # the guard of an earlier compilation that failed; "" for the first
    seconds: float  # without the time spent in the backend


@dataclass(frozen=True)
class Broken:
    """One graph break."""

    source: str  # file:line
    code: str
    reason: str


def compile_id() -> str:
    """Return the id of Dynamo's current compilation as in its logs; "" outside of compilations."""
    return str(torch._guards.CompileContext.current_compile_id() or "")


def traced() -> list[Traced]:
    """Return torch's records of its last 64 compilations, in order."""
    from torch._dynamo.utils import get_compilation_metrics

    return [
        Traced(
            str(each.compile_id),
            each.co_name,
            f"{each.co_filename}:{each.co_firstlineno}",
            _failed_guard(each.recompile_reason or ""),
            max(0.0, (each.entire_frame_compile_time_s or 0.0) - (each.backend_compile_time_s or 0.0)),
        )
        for each in get_compilation_metrics()
        if each.co_name is not None  # None: a backward graph, compiled when it first ran
    ]


def _failed_guard(reason: str) -> str:
    """Return the guard and its line of code in one line, without the compilation's id and the stack that torch adds."""
    guard = reason.partition("User stack trace:")[0]
    return re.sub(r"^\d+/\d+: ", "", " ".join(guard.split()))


def ends_in_break(gm: Any) -> bool:
    """Whether `gm` ends in a graph break: the code behind the break runs before the backward of `gm`."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


def graph_breaks() -> list[Broken]:
    """Return the graph breaks of this process, in the order in which Dynamo recorded them."""
    from torch._dynamo.output_graph import graph_break_reasons

    found = []
    for each in graph_break_reasons:
        reason = next(iter(each.reason.strip().splitlines()), "")
        frame = each.user_stack[-1] if each.user_stack else None
        where = "" if frame is None else f"{frame.filename}:{frame.lineno}"
        code = "" if frame is None else frame.line or ""
        found.append(Broken(where, code, _BREAKS.get(reason.split(" ")[0], reason)))
    return found


# Descriptions of the breaks for which Dynamo gives a name instead of a sentence.
_BREAKS = {
    "generic_jump": "which branch is taken depends on a tensor's value",
    "step_unsupported": "Dynamo does not trace this statement",
}


def only_in_backward() -> AbstractContextManager[None]:
    """Return a context in which AOTAutograd traces nodes that its partitioner places in backward only."""
    from torch._functorch._aot_autograd.graph_capture_wrappers import set_partitioner_tag_must_be_in_backward

    return set_partitioner_tag_must_be_in_backward() if traceback.has_preserved_node_meta() else nullcontext()
