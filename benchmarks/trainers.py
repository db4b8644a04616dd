"""Time training steps of accelerate, Hugging Face's Trainer and Lightning Fabric with and without overlapc.

    torchrun --nproc-per-node 4 benchmarks/trainers.py
    torchrun --nproc-per-node 2 benchmarks/trainers.py --device cpu --tiny --steps 4

Every trainer trains transformers' Llama with FSDP2 by layer, bf16, AdamW and clipping, once as it is and once with the
recipe of docs/TRAINERS.md, from the same weights, on the same tokens. The table has the first step, the median of the
later steps by rank 0's clock (ranks wait for each other in every step), and the largest relative difference of losses.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # recipes and CPU ranks for accelerate: the tests' own
from tests.trainers.recipes import recipe
from tests.trainers.test_huggingface_ranks import HOW, shard_on_cpus

REAL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32_000}  # fmt: skip
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip


class Clock:
    """The times of the steps of one training."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.times_s: list[float] = []
        self.losses: list[Tensor] = []
        self.last_s = self._now_s()

    def _now_s(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(self, loss: Tensor) -> None:
        """A step has ended."""
        self.losses.append(loss.detach().clone())
        now_s = self._now_s()
        self.times_s.append(now_s - self.last_s)
        self.last_s = now_s


def llama(args: argparse.Namespace) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(TINY if args.tiny else REAL), use_cache=False))


def samples(args: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Return the rows of all ranks and steps."""
    count = args.steps * args.batch * dist.get_world_size()
    vocabulary = (TINY if args.tiny else REAL)["vocab_size"]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(vocabulary, (count, args.seq), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def with_accelerate(args: argparse.Namespace, ours: bool) -> Clock:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    if args.device == "cpu":
        shard_on_cpus()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **HOW)
    accelerator = Accelerator(cpu=args.device == "cpu", fsdp_plugin=plugin, mixed_precision="bf16")
    model = llama(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loader: Any = torch.utils.data.DataLoader(samples(args), batch_size=args.batch)  # type: ignore[arg-type]
    prepare = recipe("accelerate")["prepare"] if ours else Accelerator.prepare
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    clock = Clock(args.device)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss)
    return clock


def with_trainer(args: argparse.Namespace, ours: bool) -> Clock:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Timed(TrainerCallback):
        clock: Clock

        def on_train_begin(self, *given: Any, **others: Any) -> None:
            self.clock = Clock(args.device)

    class Losses(Trainer):
        def training_step(self, *given: Any, **others: Any) -> Tensor:
            loss: Tensor = super().training_step(*given, **others)
            timed.clock.step(loss)
            return loss

    timed = Timed()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=args.steps, per_device_train_batch_size=args.batch, learning_rate=1e-4,
            logging_steps=1000, save_strategy="no", use_cpu=args.device == "cpu", report_to=[], disable_tqdm=True,
            bf16=True, optim="adamw_torch_fused", fsdp=True, fsdp_config={"version": 2, **HOW},
        )  # fmt: skip
        if args.device == "cpu":
            shard_on_cpus()
        callbacks = [timed, *([recipe("Hugging Face Trainer")["Overlapc"]()] if ours else [])]
        Losses(llama(args), arguments, train_dataset=samples(args), callbacks=callbacks).train()  # type: ignore
    return timed.clock


def with_fabric(args: argparse.Namespace, ours: bool) -> Clock:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def parallelize(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh, policy = device_mesh["data_parallel"], MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model.model.layers:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, mp_policy=policy)  # type: ignore[arg-type]
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if ours:
            import overlapc

            overlapc.adopt_fsdp2(model).compile(backend="overlapc")
        return model

    ranks = dist.get_world_size()
    strategy = ModelParallelStrategy(parallelize_fn=parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
    fabric = Fabric(accelerator=args.device, devices=ranks, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(llama(args))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    clock = Clock(args.device)
    for batch in _batches(args, fabric.device):
        loss = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss)
    return clock


def _batches(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yield this rank's batches, which are those that accelerate gives it."""
    rows, ranks = samples(args), dist.get_world_size()
    for first in range(dist.get_rank() * args.batch, len(rows), ranks * args.batch):
        tokens = torch.stack([row["input_ids"] for row in rows[first : first + args.batch]]).to(device)
        yield {"input_ids": tokens, "labels": tokens}


TRAINERS: dict[str, Callable[[argparse.Namespace, bool], Clock]] = {
    "accelerate": with_accelerate, "trainer": with_trainer, "fabric": with_fabric,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--trainers", default=",".join(TRAINERS), help="some of %(default)s")
    parser.add_argument("--tiny", action="store_true", help="a tiny Llama with rows of 8 tokens, for CPUs")
    parser.add_argument("--seq", type=int, default=2048, help="tokens per row")
    parser.add_argument("--batch", type=int, default=2, help="rows per rank")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    if args.tiny:
        args.seq = 8
    if args.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rows = []
    for name in args.trainers.split(","):
        losses: dict[bool, Tensor] = {}
        for ours in (False, True):
            torch._dynamo.reset()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            clock = TRAINERS[name](args, ours)
            later_ms = [1e3 * each for each in clock.times_s[len(clock.times_s) // 2 :]]
            losses[ours] = torch.stack(clock.losses).float().cpu()
            row = [name, "overlapc" if ours else "alone", clock.times_s[0], statistics.median(later_ms), min(later_ms)]
            if ours:
                row.append(((losses[True] - losses[False]).abs() / losses[False]).max().item())
            rows.append(row)
            if dist.get_rank() == 0:
                print(*row, flush=True)
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {dist.get_world_size()} ranks on {args.device}, {args.batch} x {args.seq}")
        print(tabulate(rows, ["trainer", "", "first step s", "step ms", "min ms", "losses differ by"], floatfmt=".4g"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
