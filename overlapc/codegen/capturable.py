"""Decides which instructions a CUDA graph can capture, and gives the reason for each that it cannot.

A capture records launches with fixed addresses and sizes, and the host must not read from the device meanwhile.
Captured instructions therefore have static sizes, use one GPU, and call only ops that are known not to synchronize.
An op that is missing from the list below is not captured: that costs a cut, but is never wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from overlapc.codegen.program import Call, Launch, Program
from overlapc.fx.partitioning.rng_state import draws_nothing
from overlapc.fx.versions.sharding import group_name_of
from overlapc.ir.ops import Extern, Handle, Layout, inputs_of, sees_where_memory_begins, tree_leaves, views_in
from overlapc.runtime.collective_ops import backend_of

# Library calls of aten that neither synchronize nor choose their launches by values on the device.
_LIBRARY_CALLS = frozenset(
    """
    mm addmm bmm baddbmm mv addmv dot _scaled_mm _grouped_mm convolution convolution_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    empty empty_strided new_empty new_empty_strided fill fill_ zero_ zeros_like full full_like
    clone copy_ _to_copy contiguous cat gather scatter scatter_add index_select sort topk cumsum cumprod logcumsumexp
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
    _fused_adam _fused_adamw _fused_adam_ _fused_adamw_ _fused_sgd _fused_sgd_
    """.split()
)


def over_nccl(op: Extern) -> bool:
    """Whether the collective's process group uses NCCL for CUDA tensors; NCCL launches can be captured."""
    return carried_by(op, "cuda") == "nccl"


def carried_by(op: Extern, device_type: str) -> str:
    """Return the backend of the collective's process group for tensors on `device_type`; "" if the group is unknown."""
    if not dist.is_initialized():
        return ""
    for leaf in tree_leaves(op.arguments):
        name = leaf if isinstance(leaf, str) else group_name_of(leaf) if _is_group(leaf) else None
        backend = backend_of(name, device_type) if name is not None else ""
        if backend:
            return backend
    return ""


def _is_group(leaf: Any) -> bool:
    return hasattr(getattr(leaf, "real_obj", leaf), "group_name")


@dataclass(frozen=True)
class Rules:
    """Rules for one program: nodes on device `home` can be captured, and collectives that `takes` accepts.

    Each public method returns the reason why its argument cannot be captured, or None if it can.
    """

    program: Program
    home: torch.device
    takes: Callable[[Extern], bool]

    def launch(self, item: Launch) -> str | None:
        """Return why the launch of a kernel cannot be captured, or None."""
        if item.kernel.sizes:
            return f"size {item.kernel.sizes[0]} is known only at run time"
        layouts = ((name, self.program.layouts.get(name)) for name in item.variables)
        refused = (self.layout(name, layout) for name, layout in layouts if layout is not None)
        return next((reason for reason in refused if reason is not None), None)

    def call(self, item: Call) -> str | None:
        """Return why a library call, or the start of a collective, cannot be captured, or None."""
        op = item.op
        return self._values(item) or (self._collective(op) if item.starts else self._target(op))

    def layout(self, name: str, layout: Layout) -> str | None:
        """Return why an instruction that defines a variable of this layout cannot be captured, or None."""
        if layout.device != self.home:
            return f"{name} is on {layout.device}, not on {self.home}"
        for size in (*layout.size, *layout.stride, layout.offset):
            if size.free_symbols:
                return f"size {size} of {name} is known only at run time"
        return None

    def _collective(self, op: Extern) -> str | None:
        return None if self.takes(op) else "its process group does not run on NCCL"

    def _target(self, op: Extern) -> str | None:
        if op.comm is not None:
            return "blocking or unknown communication"
        target = getattr(op.target, "copies_results_of", op.target)
        if not isinstance(target, torch._ops.OpOverload):
            return "a conditional, a loop or another Python function"
        seeded = torch.Tag.nondeterministic_seeded in target.tags
        if seeded and not draws_nothing(target, op.args, dict(op.kwargs)):
            return "draws random numbers from torch's generator"
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(target.tags):
            return "its result must be read on the host"
        if sees_where_memory_begins(op):  # inputs of a part are copied to the memory that they had at capture
            return "depends on where its argument begins in memory"
        if target.namespace == "aten" and (target.is_view or target._schema.name[6:] in _LIBRARY_CALLS):
            return None
        return "not known to be free of synchronization"

    def _values(self, item: Call) -> str | None:
        op = item.op
        for leaf in inputs_of(op):
            if isinstance(leaf, Handle):
                return f"reads {leaf.buffer}, which is not a tensor"
        for view in (*views_in(op.arguments), *op.mutates, *views_in(op.result)):
            refused = self.layout(view.buffer, view.layout)
            if refused is not None:
                return refused
        for leaf in tree_leaves((op.arguments, op.result)):
            expr = leaf.expr if isinstance(leaf, Handle) else leaf
            if getattr(expr, "free_symbols", None):
                return f"size {expr} is known only at run time"
        return None
