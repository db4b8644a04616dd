"""Changes what AOTAutograd does while overlapc traces a step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch._logging._internal import trace_log
from torch.distributed.tensor import placement_types
from torch.fx import traceback
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor

from overlapc.fx.versions.tensors import size_hint


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace `attributes` of a module or class, and put the old ones back in the end."""
    before = {name: vars(owner)[name] for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def checkpoints_without_backward() -> Iterator[None]:
    """Let AOTAutograd trace checkpoints that draw random numbers in a graph without backward.

    torch refuses them in every graph that it does not partition, although nothing is recomputed if none of its nodes is
    backward's: then a validation step under `no_grad` with dropout fails.
    """
    from torch._functorch._activation_checkpointing import remat_using_tags_for_fwd_loss_bwd_graph_pass as module

    recompute = module.remat_using_tags_for_fwd_loss_bwd_graph

    def recompute_in_backward(gm: fx.GraphModule) -> fx.GraphModule:
        notes = [(node.meta, node.meta.get("custom") or {}) for node in gm.graph.nodes]
        backward = any(meta.get("autograd_backward") or custom.get("phase") == "backward" for meta, custom in notes)
        done: fx.GraphModule = recompute(gm) if backward else gm
        return done

    with replaced(module, remat_using_tags_for_fwd_loss_bwd_graph=recompute_in_backward):
        yield


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
    guess = MemoryFormatMeta.from_tensor

    def guess_of(result: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        guessed = guess(result, *args, **kwargs)
        if guessed is None or guessed.stride is None or guessed.size is None or not where(guessed.size, guessed.stride):
            return guessed
        return MemoryFormatMeta(memory_format=torch.contiguous_format)

    with replaced(MemoryFormatMeta, from_tensor=staticmethod(guess_of)):
        yield


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

    with replaced(proxy_tensor, _sym_register=registered):
        yield


@contextmanager
def pads_on_every_rank() -> Iterator[None]:
    """Let DTensor pad and cut tensors on all ranks while it is traced, also on those where nothing is missing.

    Only some ranks pad if a dim does not divide evenly; ranks would then trace different graphs. torch does this itself
    for symbolic sizes (2.13). An empty part is cut from the tensor, too: if it were a new tensor, its gradient would
    depend on nothing, and torch would communicate it in forward.
    """

    def padded(tensor: torch.Tensor, dim: int, missing: Any) -> torch.Tensor:
        if isinstance(missing, int) and missing == 0:
            return torch.nn.functional.pad(tensor, [0, 0] * (tensor.ndim - dim))
        return pad(tensor, dim, missing)

    def cut(tensor: torch.Tensor, dim: int, added: Any) -> torch.Tensor:
        if isinstance(added, int) and added == 0:
            return tensor.narrow(dim, 0, tensor.size(dim))
        return unpad(tensor, dim, added)

    def cut_to_part(dim: int, tensor: torch.Tensor, added: Sequence[int], rank: int, _: bool) -> torch.Tensor:
        return cut(tensor, dim, added[rank])

    def filled(parts: list[torch.Tensor], dim: int, missing: int) -> list[torch.Tensor]:
        return [*parts, *(parts[0].narrow(dim, 0, 0) for _ in range(missing))]

    pad, unpad = placement_types.pad_tensor, placement_types.unpad_tensor
    of_parts = {"_maybe_unpad_tensor_with_sizes": staticmethod(cut_to_part)}
    functions = {"pad_tensor": padded, "unpad_tensor": cut, "fill_empty_tensor_to_shards": filled}
    with replaced(placement_types, **functions), replaced(placement_types.Shard, **of_parts):
        yield


@contextmanager
def costs_of_saving() -> Iterator[None]:
    """Let torch's partitioner take every value for at least one byte, and symbolic sizes for what ranks agreed on.

    Else it would save a value without elements, which costs nothing, where it recomputes one with elements: ranks whose
    shard of a parameter has no rows would divide the step differently, and so would ranks that have other batches.
    """
    from torch._functorch import partitioners  # not at the top, as below

    def hint(size: int | torch.SymInt, fallback: int) -> int:
        return size_hint(size)

    size_of, name = partitioners._size_of, "optimization_hint"
    if not hasattr(partitioners, name):  # torch 2.11
        name = "size_hint"
    with replaced(partitioners, _size_of=lambda node: max(1, size_of(node)), **{name: hint}):
        yield


@contextmanager
def no_code_of_graphs() -> Iterator[None]:
    """While AOTAutograd traces, most of its graphs become Python code only if they are called, and text only if torch
    logs them."""
    # Not at the top: they import all of Dynamo, which takes a second.
    from torch._functorch import partitioners
    from torch._functorch._aot_autograd import graph_compile

    logs = (graph_compile.aot_joint_log, graph_compile.aot_graphs_log)
    logged = trace_log.handlers or any(log.isEnabledFor(logging.INFO) for log in logs)
    no_text = {"_log_joint_graph": lambda *_: None, "_log_fw_bw_graphs": lambda *_: (None, None)}
    reorder = partial(_reordered, partitioners.reordering_to_mimic_autograd_engine)
    with (
        replaced(graph_compile, **({} if logged else no_text)),
        replaced(partitioners, reordering_to_mimic_autograd_engine=reorder),
        _use_lazy_graph_module(True),
    ):
        yield


def _reordered(reorder: Callable[[fx.GraphModule], fx.GraphModule], gm: fx.GraphModule) -> fx.GraphModule:
    """Call torch's `reorder`, whose module would write its code now and again for every change and copy."""
    write_code, here = fx.GraphModule.recompile, threading.get_ident()
    with replaced(fx.GraphModule, recompile=lambda self: None if threading.get_ident() == here else write_code(self)):
        reordered = reorder(gm)  # without code: only its graph is used
    return _LazyGraphModule.from_graphmodule(reordered)


def only_in_backward() -> AbstractContextManager[None]:
    """Return a context in which AOTAutograd traces nodes that its partitioner places in backward only."""
    from torch._functorch._aot_autograd.graph_capture_wrappers import set_partitioner_tag_must_be_in_backward

    return set_partitioner_tag_must_be_in_backward() if traceback.has_preserved_node_meta() else nullcontext()
