"""What the fork server of tests/ranks.py imports and computes, so that no rank spends half a second on it."""

from __future__ import annotations

from importlib import import_module

import torch
from torch._dynamo import trace_rules

from overlapc.fx.decompositions import decompositions

for name in (
    "overlapc.backend",
    "overlapc.codegen.cpp",
    "overlapc.codegen.triton",
    "overlapc.compilation.stages",
    "overlapc.parallel",
    "overlapc.runtime.async_inputs",
    "pytest",  # by every test file
    "sympy.tensor.tensor",
    "tests.untimed_guards",
    "torch._dynamo.repro.after_dynamo",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch.distributed.run",
):
    import_module(name)
decompositions()
torch._dynamo.list_backends()
trace_rules.get_torch_obj_rule_map()
