"""A model in a module of its own: torch finds what it kept by its source."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.linear(x)).square().mean()
