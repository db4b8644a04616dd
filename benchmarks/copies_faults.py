"""Kill or stop a rank of a training job whose collectives are copies, and see how the job ends.

    python benchmarks/copies_faults.py --device cuda --times 3

In each job a small sharded model trains on 2 ranks (`--ranks`), and at a random moment the last rank gets SIGKILL or
SIGSTOP. After the process group's timeout, the other ranks have to end with an error that names this rank. The table
shows the time from the signal until the last of them ended, and the message. With fewer GPUs than ranks, ranks share
GPUs, over gloo.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import overlapc
from overlapc.launch.llama import Llama, LlamaConfig

TIMEOUT_S = 8
HANGS_S = 60.0  # a rank that lives this long after the signal counts as hanging
STEPS_BEFORE = 20
SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def train(device_type: str, progress: Path) -> None:
    """Train on one rank until something ends the process."""
    rank = int(os.environ["RANK"])
    device, backend = torch.device("cpu"), "gloo"
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = "gloo" if SHARED_GPU in os.environ else "nccl"
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    with torch.device(device):
        model = Llama(LlamaConfig.tiny())
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in (*model.layers, model):
        overlapc.fully_shard(part, mesh=mesh, mp_policy=policy)
    step = torch.compile(model, backend="overlapc", options={"transport": "copy", "warm_start": False})
    tokens = torch.randint(0, LlamaConfig.tiny().vocab, (2, 32), device=device)
    for number in range(1_000_000):
        step(tokens, tokens).backward()
        model.zero_grad(set_to_none=True)
        if number % 5 == 0:
            if device_type == "cuda":
                torch.cuda.synchronize()
            progress.write_text(str(number))


def one(device: str, how: str, ranks: int, dice: random.Random, folder: Path) -> tuple[float, str]:
    """Run one job; return the seconds from the signal until the last survivor ended, and rank 0's error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(ranks):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(port)}
        if device == "cuda" and torch.cuda.device_count() < ranks:
            env[SHARED_GPU] = "1"
        command = [sys.executable, __file__, "--device", device, "--progress", str(folder / f"{rank}.steps")]
        log = (folder / f"{rank}.log").open("w")
        started.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        log.close()
    try:
        steps = folder / f"{ranks - 1}.steps"
        ends = time.monotonic() + 120
        while not (steps.exists() and int(steps.read_text() or 0) >= STEPS_BEFORE):
            if time.monotonic() > ends or any(each.poll() is not None for each in started):
                return float("nan"), "the ranks never trained:\n" + (folder / "0.log").read_text()[-2000:]
            time.sleep(0.05)
        time.sleep(dice.random() * 0.5)
        started[-1].send_signal(SIGNALS[how])
        began = time.monotonic()
        for each in started[:-1]:
            each.wait(max(0.1, began + HANGS_S - time.monotonic()))
        return time.monotonic() - began, told((folder / "0.log").read_text())
    except subprocess.TimeoutExpired:
        return float("inf"), "a survivor hangs:\n" + (folder / "0.log").read_text()[-2000:]
    finally:
        for each in started:
            each.kill()
            each.wait()


def told(log: str) -> str:
    """Return the line of a log that says what happened."""
    lines = [line for line in log.splitlines() if "has not" in line or "Error" in line]
    named = [line for line in lines if "has not" in line]
    return (named or lines or log.splitlines() or ["nothing"])[0][:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=3, help="jobs for each signal (default: 3)")
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.progress is not None:
        train(args.device, args.progress)
        return
    dice = random.Random(0)
    rows = []
    for how in SIGNALS:
        for _ in range(args.times):
            with tempfile.TemporaryDirectory() as folder:
                seconds, message = one(args.device, how, args.ranks, dice, Path(folder))
            rows.append([how, seconds, message])
            print(tabulate(rows[-1:], tablefmt="plain", floatfmt=".1f"), flush=True)
    print(tabulate(rows, ["signal", f"s until the end (timeout {TIMEOUT_S})", "message"], floatfmt=".1f"))


if __name__ == "__main__":
    main()
