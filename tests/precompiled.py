"""Models for tests of precompilation, in a module of their own because torch's cache keys include the source file."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

activation = {"gelu": torch.nn.functional.gelu, "tanh": torch.tanh}[os.environ.get("ACTIVATION", "gelu")]


class Model(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return activation(self.linear(x)).square().mean() * self.scale


class WithActivation(nn.Module):
    """A module that calls a function stored as its attribute."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x)
