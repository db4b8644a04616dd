"""`overlapc::run_kernel`: an op that runs a generated kernel, so that FX graphs can contain it and tracers can see it.

According to its schema the op writes to all of its buffers; it returns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_launchers: dict[str, Callable[..., None]] = {}
_library = torch.library.Library("overlapc", "FRAGMENT")
_library.define("run_kernel(str kernel, Tensor(a!)[] buffers, SymInt[] sizes) -> ()")


def register(name: str, launcher: Callable[..., None]) -> None:
    """Register a kernel by its name, which is a hash of its content: kernels with the same name are equal."""
    _launchers[name] = launcher


def _run(kernel: str, buffers: Sequence[Tensor], sizes: Sequence[int]) -> None:
    _launchers[kernel](*buffers, *sizes)


def _fake(kernel: str, buffers: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Do nothing: shapes and dtypes do not change."""


_library.impl("run_kernel", _run, "CompositeExplicitAutograd")
torch.library.register_fake("overlapc::run_kernel", _fake, lib=_library)
