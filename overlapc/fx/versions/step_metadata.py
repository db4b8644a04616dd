"""What AOTAutograd knows about the results and gradients of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor


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
