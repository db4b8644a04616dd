"""The module that is generated for a program."""

from __future__ import annotations

import torch

from overlapc.codegen.python import FIXED_NAMES
from tests.lowering.against_eager import same


def test_ops_may_have_the_names_that_the_module_uses_itself() -> None:
    library = torch.library.Library("overlapc_names", "DEF")
    names = sorted(FIXED_NAMES)
    for name in names:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x * 3, "CompositeExplicitAutograd")
        torch.library.register_fake(f"overlapc_names::{name}", torch.empty_like, lib=library)

    def function(x):
        for name in names:
            x = getattr(torch.ops.overlapc_names, name)(x) + 1
        return x, *torch.sort(x, dim=0)

    same(function, torch.randn(5))
