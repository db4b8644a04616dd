"""What AOTAutograd and Dynamo note in their graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch._library.fake_class_registry import FakeScriptObject
from torch._library.opaque_object import is_opaque_value
from torch.distributed.device_mesh import DeviceMesh
from torch.fx._lazy_graph_module import _LazyGraphModule

from overlapc.fx.graph_copy import copied


def is_object(node: fx.Node) -> bool:
    """Whether the value of a node is an object that graphs only pass on, such as a DeviceMesh."""
    value = _traced_value(node)
    return isinstance(value, torch.ScriptObject | FakeScriptObject) or is_opaque_value(value)


def value_of_object(node: fx.Node) -> Any:
    """Return the object that `node`, which is one, stands for."""
    value = _traced_value(node)
    return getattr(value, "real_obj", value)


def use_real_objects(gm: fx.GraphModule) -> None:
    """Replace traced stand-ins among a graph's attributes by the objects they stand for, which callers may get.

    AOTAutograd leaves a stand-in where tracing gets an object from another one, such as a group from a DeviceMesh.
    """
    for node in gm.graph.find_nodes(op="get_attr"):
        value = getattr(gm, str(node.target), None)
        if isinstance(value, FakeScriptObject):
            setattr(gm, str(node.target), value.real_obj)


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


def binds_sizes(node: fx.Node) -> bool:
    """Whether the node defines sizes that depend on data."""
    return bool(node.meta.get("unbacked_bindings"))


def belongs_to_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd tagged a node of a joint graph as backward's, for example a mutation made in backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def is_tangent(node: fx.Node) -> bool:
    """Whether a node of a joint graph is an input of its backward alone: the gradient of a result."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def lacks_results(joint: fx.Graph, forward_outputs: int) -> bool:
    """Whether a joint graph returns fewer than the `forward_outputs` results of forward that AOTAutograd expects.

    It counts the symbolic sizes of DTensors among them before it traces the joint graph. A size that is found to be
    constant by then is no longer returned, and AOTAutograd would take each gradient for the result before it.
    """
    results = joint.output_node().meta["desc"][:forward_outputs]
    if not any(isinstance(result, SubclassGetAttrAOTOutput) for result in results):
        return False
    last = _outermost(results[-1])
    return last is None or isinstance(last, GradAOTOutput)  # None describes the absent gradient of an input


def inputs_written_after(joint: fx.Graph) -> set[fx.Node]:
    """Return the inputs of a joint graph into which AOTAutograd's wrapper copies results after forward has run."""
    results = map(_outermost, joint.output_node().meta["desc"])
    written = {result.mutated_input for result in results if isinstance(result, InputMutationAOTOutput)}
    return {node for node in joint.find_nodes(op="placeholder") if _outermost(node.meta.get("desc")) in written}


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


def donated_inputs() -> list[int] | None:
    """Return the positions of inputs that only the backward graph being compiled refers to; None if unknown.

    A saved tensor that is a view of a parameter, for instance, is not among them.
    """
    found: Any = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    donated: list[int] | None = getattr(found, "bw_donated_idxs", None)
    return donated


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
