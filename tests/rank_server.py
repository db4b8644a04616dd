"""What the fork server of tests/ranks.py imports and computes, so that no rank spends half a second on it."""

from __future__ import annotations

from importlib import import_module
from unittest import mock

import torch
from torch._dynamo import trace_rules

from overlapc.fx.decompositions import decompositions

for name in (
    "overlapc.backend",
    "overlapc.codegen.cpp",
    "overlapc.codegen.triton",
    "overlapc.compilation.preparation",
    "overlapc.compilation.stages",
    "overlapc.options.checked_options",
    "overlapc.parallel",
    "overlapc.parallel.guarded",
    "overlapc.parallel.replayed_blocks",
    "overlapc.runtime.async_inputs",
    "overlapc.runtime.check_values",
    "overlapc.runtime.cuda_graphs",
    "overlapc.runtime.lifecycle",
    "pytest",  # by every test file
    "sympy.tensor.tensor",
    "tests.untimed_guards",
    "torch.distributed.run",
):
    import_module(name)
decompositions()
torch._dynamo.list_backends()
trace_rules.get_torch_obj_rule_map()


def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, x[0]))
    return torch.nn.functional.layer_norm(hidden, (8,)).square().mean()


# What torch imports and computes for its first compile; none of it is about this program, which is forgotten. A process
# that forks must have no threads: torch makes a progress bar that it never shows, and the first one starts a thread.
with mock.patch("tqdm.tqdm.monitor_interval", 0):
    torch.compile(program, backend="aot_eager")(torch.ones(4, 8), torch.ones(8, 8, requires_grad=True)).backward()
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
