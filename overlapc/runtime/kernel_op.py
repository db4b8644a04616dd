"""`overlapc::run_kernel`: a generated kernel as an op that graphs can hold and tracers can see.

The op writes into its buffers (as far as anybody can tell, into all of them) and returns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_launchers: dict[str, Callable[..., None]] = {}
_library = torch.library.Library("overlapc", "FRAGMENT")
_library.define("run_kernel(str kernel, Tensor(a!)[] buffers, SymInt[] sizes) -> ()")


def register(name: str, launcher: Callable[..., None]) -> None:
    """Makes a kernel known by its name, which is its content's: a second one of that name is the same."""
    _launchers[name] = launcher


def _run(kernel: str, buffers: Sequence[Tensor], sizes: Sequence[int]) -> None:
    _launchers[kernel](*buffers, *sizes)


def _fake(kernel: str, buffers: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Shapes and dtypes do not change."""


_library.impl("run_kernel", _run, "CompositeExplicitAutograd")
torch.library.register_fake("overlapc::run_kernel", _fake, lib=_library)
