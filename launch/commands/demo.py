"""`overlapc demo`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from overlapc.launch.commands.common import (
    Options,
    Passes,
    Processes,
    check_torch,
    new_run_folder,
    option_variables,
    writable,
)
from overlapc.launch.torchrun import run_ranks


def demo(
    nproc: Processes = 2,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="gloo with C++ kernels, or NCCL with Triton")] = "cpu",
    dtype: Annotated[
        str, typer.Option(metavar="fp32|bf16", help="dtype of compute; gradients are reduced in fp32")
    ] = "fp32",
    tp: Annotated[int, typer.Option(metavar="N", help="tensor- and sequence-parallel ranks; must divide --nproc")] = 1,
    hsdp: Annotated[int, typer.Option(metavar="N", help="replicas of the sharded parameters; must divide --nproc")] = 1,
    steps: Annotated[int, typer.Option(metavar="N", help="training steps of each of the two runs")] = 12,
    batch: Annotated[int, typer.Option(metavar="N", help="rows per data-parallel rank")] = 4,
    seq: Annotated[int, typer.Option(metavar="N", help="tokens (bytes) per row")] = 256,
    model: Annotated[
        str, typer.Option(metavar="tiny|demo|8b", help="size of the model; 8b: 8 layers of Llama-8B")
    ] = "demo",
    no_reshard: Annotated[
        bool, typer.Option("--no-reshard", help="keep parameters gathered between forward and backward")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="measure 3 more steps and compare each kernel and collective with its prediction"
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="folder of this run (default: runs/<date-time>)", show_default=False),
    ] = None,
    passes: Passes = None,
    option: Options = None,
) -> None:
    """Train a small Llama on real text with overlapc, then with eager FSDP2, and compare.

    Prints both losses, step times and the overlap table; writes report.html, schedule.txt and record.json
    of every rank. The exit code is 1 if fp32 losses differ by more than 1e-5.
    """
    variables = option_variables(passes, option)
    check_torch()
    from overlapc.launch.demo import DemoConfig

    cfg = DemoConfig(nproc, device, dtype, tp, hsdp, steps, batch, seq, not no_reshard, model, profile=profile)
    cfg.check()
    if device == "cpu":
        from overlapc.runtime.toolchain import find_compiler

        find_compiler()
    run_dir = writable(out or new_run_folder())
    command = ("-m", "overlapc.launch.demo", json.dumps(dataclasses.asdict(cfg)))
    run_ranks(command, nproc, run_dir, variables)
