"""An FSDP2 script with one line for overlapc: fused AdamW, gradient clipping, a learning rate schedule, and training
resumed from a checkpoint.

overlapc run --nproc 2 examples/resume.py
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import Arguments, main
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import overlapc
from overlapc.launch.llama import Llama, LlamaConfig


class Trainer:
    """A model, its optimizer and its learning rate schedule, always with the same initial values."""

    def __init__(self, args: Arguments, mesh: DeviceMesh) -> None:
        with torch.device(args.device):
            self.model: nn.Module = Llama(LlamaConfig.tiny())
        self.model.reset_parameters(seed=0)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        if not args.eager:
            self.model = overlapc.adopt_fsdp2(self.model)  # the one line for overlapc
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=args.steps)
        self.step = args.compile(self.model)
        self.args, self.rank, self.done = args, mesh.get_rank(), 0

    def run(self, steps: int) -> list[float]:
        """Train for `steps` more steps. Return the losses of this rank."""
        losses = []
        for number in range(self.done, self.done + steps):
            loss = self.step(*self.args.tokens(vocabulary=64, length=32, seed=100 * number + self.rank))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=0.5)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        self.done += steps
        return losses

    def save(self, folder: Path) -> None:
        """Save a distributed checkpoint: each rank writes its shards."""
        dcp.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Load a distributed checkpoint, which any number of ranks may have saved."""
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.done = state["done"]

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict(), "done": self.done}


def train(args: Arguments) -> list[float]:
    """Train half of the steps, save a checkpoint, and train the other half with a new trainer that loads it. Return the
    losses of this rank."""
    mesh = args.mesh(dp=-1)
    folder = [tempfile.mkdtemp()] if mesh.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    first = Trainer(args, mesh)
    losses = first.run(args.steps // 2)
    first.save(Path(folder[0]))
    second = Trainer(args, mesh)
    second.load(Path(folder[0]))
    losses += second.run(args.steps - args.steps // 2)
    dist.barrier()
    if mesh.get_rank() == 0:
        shutil.rmtree(folder[0])
    return losses


if __name__ == "__main__":
    main(train, __doc__)
