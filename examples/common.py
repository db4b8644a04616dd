"""Code that the examples share: their arguments, a mesh of all ranks, batches and the training loop."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Arguments:
    """The command line arguments of an example."""

    device: str = "cpu"
    steps: int = 10
    eager: bool = False  # run without compiling, for losses to compare with

    def compile(self, function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        """Compile `function` with overlapc, unless the run is eager."""
        return function if self.eager else torch.compile(function, backend="overlapc", **how)

    def mesh(self, **axes: int) -> DeviceMesh:
        """Return a mesh of all ranks. axes: the size of each axis; -1 for one axis means the remaining ranks."""
        named = math.prod(size for size in axes.values() if size > 0)
        left = int(os.environ["WORLD_SIZE"]) // named
        if self.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        sizes = tuple(left if size < 0 else size for size in axes.values())
        return init_device_mesh(self.device, sizes, mesh_dim_names=tuple(axes))

    def tokens(self, vocabulary: int, length: int, seed: int, rows: int = 4) -> tuple[Tensor, Tensor]:
        """Return (tokens, next tokens), int64 `[rows, length]`: arithmetic progressions modulo the vocabulary, which
        are learned fast."""
        start = torch.randint(vocabulary, (rows, 1), generator=torch.Generator().manual_seed(seed))
        text = ((start + 3 * torch.arange(length + 1)) % vocabulary).to(self.device)
        return text[:, :-1], text[:, 1:]


def losses_of(
    step: Callable[..., Tensor], optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]
) -> list[float]:
    """Train on each of `batches`. Return the losses of this rank."""
    losses = []
    for tokens, targets in batches:
        loss = step(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(train: Callable[[Arguments], list[float]], description: str | None) -> None:
    """Run an example from the command line, and print the losses of the last rank."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=Arguments.device)
    parser.add_argument("--steps", type=int, default=Arguments.steps)
    parser.add_argument("--eager", action="store_true", help="run without compiling, for losses to compare with")
    losses = train(Arguments(**vars(parser.parse_args())))
    if dist.get_rank() == dist.get_world_size() - 1:
        print("losses", " ".join(f"{loss:.4f}" for loss in losses), flush=True)
    dist.destroy_process_group()
